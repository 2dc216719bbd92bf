"""JSON schemas of every body, with the limits of the parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flide.runtime.wire import MAX_CHECKPOINT, MAX_LEVELS, MAX_OPTIONS, MAX_SALT
from flide.serve.decisions import ROLES


def schemas(names: Sequence[str], max_questions: int) -> dict[str, Any]:
    """Name -> schema.

    Args:
        names: the names of the model that requests may use.
        max_questions: of one request.
    """
    text = {"description": "Text, or a structured value.", "type": ["string", "object", "array", "null"]}
    something = {**text, "type": ["string", "object", "array"]}
    string, probability = {"type": "string"}, {"type": "number", "minimum": 0, "maximum": 1}
    count = {"type": "integer", "minimum": 0}
    described = {"description": {"type": ["string", "null"]}}
    name = {"name": {"type": ["string", "null"]}}
    model = {"type": "string", "enum": list(names)}

    def question(kind: str, criteria: Any, *, needed: bool = True) -> dict[str, Any]:
        fields = {"type": {"const": kind}, "instructions": text, "criteria": criteria}
        return _object(fields, required=["type", "criteria"] if needed else ["type"])

    def asked(kind: str, **options: Any) -> dict[str, Any]:
        fields = {"type": {"const": kind}, "instructions": reference("Parts"), **options, **name}
        return _object(fields, required=["type", "instructions", *options])

    def listed(schema: Any, most: int | None = None) -> dict[str, Any]:
        return {"type": "array", "items": schema, "minItems": 1, **({} if most is None else {"maxItems": most})}

    def by_type(*schemas: str) -> dict[str, Any]:
        return {"oneOf": [reference(schema) for schema in schemas]}

    sides = {"type": ["object", "null"], "properties": {"true": text, "false": text}, "additionalProperties": False}
    options = {"type": "object", "additionalProperties": text, "minProperties": 1, "maxProperties": MAX_OPTIONS}
    spread = {"type": "object", "additionalProperties": probability, "minProperties": 1}
    value = {"type": ["string", "boolean"]}
    return {
        "SystemOneRequest": _object(
            {
                "model": model,
                "state": {**something, "description": "What the questions are about."},
                "questions": {
                    "type": "object",
                    "description": "By an id of your own, which the model does not see.",
                    "additionalProperties": by_type("Noul", "Choice", "Score"),
                    "minProperties": 1,
                    "maxProperties": max_questions,
                },
                "x_flide": reference("Options"),
                "assets": {"enum": [None, {}, [], "", False, 0], "description": "Nothing: only text can be read."},
            },
            required=["model", "state", "questions"],
        ),
        "Noul": question("noul", {**sides, "description": "What true and false mean."}, needed=False),
        "Choice": question("choice", {**options, "description": "Names with descriptions, or null."}),
        "Score": question("score", {**listed(something, MAX_LEVELS), "description": "Levels, from low to high."}),
        "SystemOneResponse": _object(
            {
                "model": string,
                "answers": {
                    "type": "object",
                    "additionalProperties": by_type("NoulAnswer", "ChoiceAnswer", "ScoreAnswer"),
                },
                "usage": _object({"input_tokens": count, "output_tokens": count}),
                "x_flide": reference("Extras"),
            }
        ),
        "Options": {
            "type": ["object", "null"],
            "properties": {
                "cache_salt": {
                    "type": ["string", "null"],
                    "minLength": 1,
                    "maxLength": MAX_SALT,
                    "description": "Requests with different salts share no state that was computed before.",
                },
                "checkpoint": {
                    "type": ["boolean", "integer", "null"],
                    "minimum": 0,
                    "maximum": MAX_CHECKPOINT,
                    "description": (
                        "Where the state is kept for later requests: true at its end, a number also after so many "
                        "messages or characters, false nowhere."
                    ),
                },
            },
        },
        "Extras": _object(
            {
                "model_hash": {"type": "string", "description": "Names all that decides an answer of this model."},
                "shared_tokens": {**count, "description": "Not read, because questions share them."},
                "reused_tokens": {**count, "description": "Of the input, not computed: an earlier request had them."},
            }
        ),
        "NoulAnswer": _object({"type": {"const": "noul"}, "noul": probability}),
        "ChoiceAnswer": _object(
            {"type": {"const": "choice"}, "choice": string, "probabilities": spread, "confidence": probability}
        ),
        "ScoreAnswer": _object(
            {
                "type": {"const": "score"},
                "score": {"type": "number", "minimum": 0, "maximum": MAX_LEVELS - 1},
                "legend": {"type": "object", "additionalProperties": something},
                "probabilities": spread,
                "confidence": probability,
            }
        ),
        "OpenAIRequest": _object(
            {
                "model": model,
                "input": {"anyOf": [string, listed(reference("Message"))]},
                "questions": listed(by_type("Predicate", "TypedChoice", "LabelledScore"), max_questions),
                "x_flide": reference("Options"),
            },
            required=["model", "input", "questions"],
        ),
        "Message": _object(
            {
                "type": {"const": "message"},
                "role": {"type": "string", "enum": list(ROLES)},
                "content": reference("Parts"),
            },
            required=["role", "content"],
        ),
        "Parts": {"anyOf": [string, listed(by_type("TextPart", "RefusalPart", "JsonPart"))]},
        "TextPart": _object({"type": {"enum": ["input_text", "output_text"]}, "text": string}),
        "RefusalPart": _object({"type": {"const": "refusal"}, "refusal": string}),
        "JsonPart": _object({"type": {"const": "input_json"}, "data": {"type": ["object", "array"]}}),
        "Predicate": asked("predicate"),
        "TypedChoice": asked(
            "choice", choices=listed(_object({"value": value, **described}, required=["value"]), MAX_OPTIONS)
        ),
        "LabelledScore": asked(
            "score", levels=listed(_object({"label": string, **described}, required=["label"]), MAX_LEVELS)
        ),
        "OpenAIResponse": _object(
            {
                "model": string,
                "answers": listed(by_type("PredicateAnswer", "TypedChoiceAnswer", "LabelledScoreAnswer")),
                "usage": _object(
                    {
                        "input_tokens": count,
                        "input_tokens_details": _object({"cached_tokens": count, "cache_write_tokens": count}),
                        "output_tokens": count,
                        "output_tokens_details": _object({"reasoning_tokens": count}),
                        "total_tokens": count,
                    }
                ),
                "x_flide": reference("Extras"),
            }
        ),
        "PredicateAnswer": _object({"type": {"const": "predicate"}, **name, "probability": probability}),
        "TypedChoiceAnswer": _object(
            {
                "type": {"const": "choice"},
                **name,
                "choice": value,
                "confidence": probability,
                "probabilities": listed(_object({"value": value, "probability": probability})),
            }
        ),
        "LabelledScoreAnswer": _object(
            {
                "type": {"const": "score"},
                **name,
                "score": {"type": "number", "minimum": 0, "maximum": MAX_LEVELS - 1},
                "confidence": probability,
                "probabilities": listed(_object({"value": count, "label": string, "probability": probability})),
            }
        ),
        "Models": _object({"models": listed(_object({"name": string, "description": string, "release_date": string}))}),
        "Status": _object({"status": string}),
        "Refusal": _object({"detail": _object({"error_type": string, "message": string})}),
        "ValidationRefusal": _object(
            {
                "detail": listed(
                    _object(
                        {
                            "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
                            "msg": string,
                            "type": string,
                        }
                    )
                )
            }
        ),
        "OpenAIRefusal": _object(
            {
                "error": _object(
                    {"message": string, "type": string, "param": {"type": ["string", "null"]}, "code": string}
                )
            }
        ),
    }


def _object(properties: Mapping[str, Any], *, required: Sequence[str] | None = None) -> dict[str, Any]:
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": dict(properties), "required": needed}


def reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
