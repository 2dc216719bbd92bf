"""Small labelled rows that can be learnt, and how tests write them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEAMS = {"shipping": "parcel broken late box", "billing": "invoice charge refund card", "sales": "price offer buy"}
LEVELS = ["calm", "annoyed", "furious"]
MOODS = ["please", "hurry", "terrible"]


def rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of three questions, one of each type, with hard and soft targets."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        team, anger = source.choice(list(TEAMS)), source.randrange(3)
        questions = {
            "late": {"type": "noul", "instructions": "Is it about a parcel?"},
            "team": {"type": "choice", "instructions": "Which team?", "criteria": dict.fromkeys(TEAMS)},
            "anger": {"type": "score", "instructions": "How angry?", "criteria": LEVELS},
        }
        targets = {"late": 0.9 if team == "shipping" else 0.05, "team": team, "anger": anger}
        state = " ".join([*source.choices(TEAMS[team].split(), k=2), MOODS[anger]])
        found.append({"model": "m", "state": state, "questions": questions, "targets": targets})
    return found


def write(path: Path, lines: list[Any]) -> Path:
    """Lines as they are, values as JSON."""
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path
