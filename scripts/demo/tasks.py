"""The decision tasks: hidden facts first, then a text that tells them, and questions whose answers follow from them."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from scripts.demo.aids import about_a_review
from scripts.demo.grammar import Writer, banks, kinds, plural
from scripts.demo.questions import Asked, choice, noul, plain_choice, score, shuffled


class Task(NamedTuple):
    """A state, and every question that can be asked about it."""

    state: Any
    asked: dict[str, Asked]


TEAMS = {
    "damaged": "shipping", "late": "shipping", "lost": "shipping", "wrong_item": "shipping",
    "double_charge": "billing", "wrong_amount": "billing", "invoice": "billing", "cancel": "billing",
    "crash": "tech", "setup": "tech", "login": "account", "profile": "account", "quote": "sales",
}  # fmt: skip
GOODS = ("damaged", "late", "lost", "wrong_item")
# Of a message of one kind it is not clear whether another is meant, too: nobody asks.
UNCLEAR = {
    "late": ("lost",),
    "lost": ("late",),
    "login": ("crash", "profile"),
    "setup": ("crash", "damaged"),
    "crash": ("setup", "damaged"),
    "damaged": ("setup", "crash"),
    "double_charge": ("wrong_amount",),
    "wrong_amount": ("double_charge", "invoice"),
    "invoice": ("wrong_amount", "profile"),
    "cancel": ("profile",),
    "profile": ("cancel", "login"),
}
REQUESTS = ("invoice", "profile", "quote", "cancel")  # that want something by themselves, and no explanation
BIG_PLANS = ("business", "enterprise")
WINDOWS = (7, 10, 14, 20, 21, 28, 30, 45, 60, 90)
LIMITS = (20, 25, 30, 40, 50, 60, 75, 80, 100, 120, 150, 180, 200, 250, 300, 400, 500)
ISSUE_WORDS = ("question", "help", "my message", "request", "please read")


def support(writer: Writer) -> Task:
    """A customer's message: an issue, and whatever else is said about it."""
    rng = writer.rng
    team = rng.choice(sorted(set(TEAMS.values())))
    issue = rng.choice([kind for kind, owner in TEAMS.items() if owner == team])
    urgency, mood = rng.choice((0, 1, 1, 2, 2, 3, 3)), rng.choice((0, 1, 1, 2, 3))
    want, again = rng.choice(_wants(issue)), rng.choice((True, False, None, None))
    plan = None
    if rng.random() < 0.4:
        plan = rng.choice(BIG_PLANS) if rng.random() < 0.3 else writer.values["plan"]
        writer.values["plan"] = plan
        urgency = 3 if rng.random() < 0.4 else urgency
    # Who wants nothing is in no hurry, and nothing stands still because of a change of address.
    urgency = min(urgency, 1 if want == "none" else 2 if issue in REQUESTS else 3)
    if issue == "quote":
        mood = min(mood, 2)
    order = rng.random() < 0.4

    if mood == 0 and (again or urgency == 3):
        mood = 1
    sentences = [about := writer.say(f"issue.{issue}")]
    urgent = writer.say(f"urgency.{urgency}") if urgency != 1 else ""
    said = [urgent, writer.say(f"mood.{mood}") if mood != 1 else "", writer.say(f"want.{want}") if want else ""]
    if again is not None:
        said.append(writer.say("again.yes" if again else "again.no"))
    if order:
        said.append(writer.say("order"))
    elif rng.random() < 0.3:
        said.append(writer.say("nonumber"))
    asides = shuffled(writer, kinds("aside"), team, *(["sales"] if issue == "quote" else []))
    asides = asides[: rng.choice((0, 0, 1, 1, 2, 3))]
    said += [writer.say(f"aside.{aside}") for aside in asides]
    days = used = None
    window = rng.randint(5, 120) if writer.split == "train" and rng.random() < 0.5 else rng.choice(WINDOWS)
    if issue in ("damaged", "wrong_item", "setup") and rng.random() < 0.6:  # what is not there is not used
        days = rng.randint(1, window) if rng.random() < 0.6 else rng.randint(window + 1, 2 * window + 30)
        used = rng.random() < 0.35
        said += [writer.say("bought", days=str(days)), writer.say("used.yes" if used else "used.no")]
    said = [sentence for sentence in said if sentence]
    rng.shuffle(said)
    cut = rng.randint(0, min(2, len(said)))
    sentences = [*said[:cut], *sentences, *said[cut:]]

    asked = {
        "team": _team(writer, team, asides, explained=want == "refund" or issue == "cancel"),
        "issue": choice(writer, "ask.issue", issue, _near(writer, issue), names="label"),
        "is_issue": _is_issue(writer, issue),
        "urgency": score(writer, "ask.urgency", urgency, scale="urgency"),
        "urgency3": score(writer, "ask.urgency", min(urgency, 2), scale="urgency3"),
        "mood": score(writer, "ask.mood", mood, scale="mood"),
        "anger": score(writer, "ask.mood", max(0, mood - 1), scale="anger"),
        "refund": noul(writer, "ask.refund", want == "refund", sides="refund"),
        "again": noul(writer, "ask.again", bool(again)),
        "order": noul(writer, "ask.order", order),
    }
    # Who praises a feature, asks once more or is at a standstill need not be neutral.
    if mood == 1 and ("tech" in asides or again or urgency == 3):
        del asked["mood"], asked["anger"]
    if want is None and issue in ("double_charge", "wrong_amount"):  # paid too much: money back goes without saying
        del asked["refund"]
    if again is None and ("none" in asides or re.search(r"\b(again|once more)\b", about)):  # or the line was busy
        del asked["again"]
    if want:
        asked["want"] = choice(writer, "ask.want", want, shuffled(writer, kinds("want"), want), names="wish")
    days_of_week = banks()["day"]["train"]
    dated = any(day in urgent for day in days_of_week)
    # A promised day, or the month in which a contract ends, is a date of another kind.
    other_date = issue == "cancel" or (issue in GOODS and any(day in about for day in days_of_week))
    if dated or (urgency != 2 and not other_date):
        asked["deadline"] = noul(writer, "ask.deadline", dated)
    if days is not None:
        asked["window"] = noul(writer, "ask.window", days <= window, window=str(window))
        asked["policy"] = noul(writer, "ask.policy", days <= window and not used, window=str(window))
    if plan:
        asked["escalate"] = noul(writer, "ask.escalate", plan in BIG_PLANS and urgency == 3)
    state = _message(writer, sentences, plan)
    told, item = str(state), writer.values["item"]
    if _mentions(told, item) and not _mentions(told, writer.values["item2"]):
        others = dict.fromkeys(writer.word("item") for _ in range(8))
        wrong = [thing for thing in others if thing not in item and thing not in told]
        asked["product"] = plain_choice(writer, "ask.product", item, wrong)
        asked["is_product"] = noul(
            writer, "isit.product", (is_so := rng.random() < 0.5), thing=item if is_so else wrong[0]
        )
    return Task(state, asked)


def _wants(issue: str) -> list[str | None]:
    """What the writer of such a message may ask for beside what the issue itself says."""
    if issue in REQUESTS:
        return [None]
    wants: list[str | None] = ["information", None, None]
    if issue not in ("setup", "login"):
        wants += ["none"] + ["refund"] * 4
    return wants + (["replacement"] * 2 if issue in GOODS else [])


def _mentions(text: str, thing: str) -> bool:
    return bool(re.search(rf"\b({re.escape(thing)}|{re.escape(plural(thing))})\b", text))


def _team(writer: Writer, team: str, asides: list[str], *, explained: bool) -> Asked:
    """``explained``: it takes the descriptions to see whose it is."""
    rng = writer.rng
    # Teams that the text mentions for no reason come first.
    others = [
        *(aside for aside in asides if aside != "none"),
        *shuffled(writer, sorted({*TEAMS.values()}), team, *asides),
    ]
    if rng.random() < 0.2:
        if rng.random() < 0.5:
            return choice(writer, "ask.team", "other", others, names="name", described="desc", explained=explained)
        others.insert(0, "other")
    return choice(writer, "ask.team", team, others, names="name", described="desc", explained=explained)


def _near(writer: Writer, issue: str) -> list[str]:
    """Other issues that are clearly others, the same team's first in half of the cases."""
    others = shuffled(writer, list(TEAMS), issue, *UNCLEAR.get(issue, ()))
    return sorted(others, key=lambda other: TEAMS[other] != TEAMS[issue]) if writer.rng.random() < 0.5 else others


def _is_issue(writer: Writer, issue: str) -> Asked:
    truth = writer.rng.random() < 0.5
    return noul(writer, f"isit.{issue if truth else _near(writer, issue)[0]}", truth)


def _message(writer: Writer, sentences: list[str], plan: str | None) -> Any:
    rng = writer.rng
    if rng.random() < 0.8:
        sentences = [sentence[0].upper() + sentence[1:] for sentence in sentences]
    planned = writer.say("planframe") if plan else ""
    style = rng.random()
    if style < 0.2:
        lines = [f"Agent: {writer.say('agent.open')}"]
        for sentence in sentences:
            lines.append(f"Customer: {sentence}")
            if rng.random() < 0.25:
                lines.append(f"Agent: {writer.say(rng.choice(('agent.ask', 'agent.wait')))}")
        return "\n".join([*([planned] if plan else []), *lines])
    text = " ".join([writer.say("greeting"), *sentences, writer.say("closing")]).strip()
    if style < 0.3:
        return {**({"plan": plan} if plan else {}), "customer": writer.word("first"), "message": text}
    if style > 0.75:
        text = writer.say("frame", text=text, issue_word=rng.choice(ISSUE_WORDS), plan=plan or "unknown")
    return f"{planned}\n{text}" if plan else text


# Words of notes that would forbid a goal.
AGAINST = {
    "calendar": ("book", "meeting", "appointment"),
    "mail": ("mail", "message", "letter", "note"),
    "edit": ("touch", "file"),
}


def agent(writer: Writer) -> Task:
    """The next step of an agent: one or two goals, what was done, what came back."""
    rng = writer.rng
    tools = kinds("goal")
    goals = shuffled(writer, tools, "vague")[: rng.choice((1, 1, 2))]
    if rng.random() < 0.1:
        goals = ["vague"]
    done = rng.choice((0, 0, 1, len(goals), len(goals)))
    failed = done < len(goals) and rng.random() < 0.35
    other = writer.word("first")
    writer.values |= {"first": writer.word("first")}
    told = [writer.say(f"goal.{goal}") for goal in goals]
    observed = [writer.say(f"done.{goal}") for goal in goals[:done]]
    if failed:
        observed.append(writer.say("failed"))
    if not observed and rng.random() < 0.6:
        observed.append(writer.say("progress"))
    noise = [writer.say("noise", first=other) for _ in range(rng.choice((0, 1, 1, 2)))]
    noise = [text for text in noise if not any(word in text for goal in goals for word in AGAINST.get(goal, ()))]
    following = "finish" if done == len(goals) else "ask" if goals == ["vague"] else goals[done]
    asked = {
        "tool": choice(
            writer,
            "ask.tool",
            following,
            _other_tools(writer, following, goals),
            names="tool",
            described="tdesc",
            most=8,
        ),
        "finished": noul(writer, "ask.finished", done == len(goals)),
        "failed": noul(writer, "ask.failed", failed),
    }
    if goals != ["vague"]:
        asked["writes"] = noul(writer, "ask.writes", any(goal in ("edit", "mail", "calendar") for goal in goals))
    if rng.random() < (0.15 if goals != ["vague"] else 0.0 if done else 1.0):
        asked["clear"] = noul(writer, "ask.clear", goals != ["vague"])
    return Task(_trace(writer, told, observed, noise), asked)


def _other_tools(writer: Writer, truth: str, goals: list[str]) -> list[str]:
    likely = [tool for tool in ("finish", *(goal for goal in goals if goal != "vague"), "ask") if tool != truth]
    kept = likely if writer.rng.random() < 0.6 else []
    return [*kept, *shuffled(writer, kinds("tool"), truth, *kept)]


def _trace(writer: Writer, told: list[str], observed: list[str], noise: list[str]) -> Any:
    rng = writer.rng
    goal = (" Then: " if rng.random() < 0.5 else " ").join(told)
    style = rng.random()
    if style < 0.2:
        return {"goal": goal, "context": " ".join(noise), "observations": observed}
    if style < 0.6:
        steps = [f"{i}. {text}" for i, text in enumerate(observed, 1)]
        return "\n".join(
            [f"Goal: {goal}", *(f"Note: {text}" for text in noise), *(["Steps so far:", *steps] if steps else [])]
        )
    return "\n".join([f"User: {goal} {' '.join(noise)}".strip(), *(f"Observation: {text}" for text in observed)])


def logs(writer: Writer) -> Task:
    """A log excerpt: one incident, lines around it, and how it ends."""
    rng = writer.rng
    components = ["database", "network", "disk", "auth", "payment"]
    component, worst = rng.choice(components), rng.choice((0, 1, 2, 2, 3, 3))
    ending = rng.choice(("recovered", "ongoing", "", "")) if worst >= 2 else ""
    writer.values |= {"service": writer.word("service")}
    others = [kind for kind in components if kind != component]

    def around(count: int) -> list[str]:
        return [
            writer.say(f"line.{rng.choice(others)}.{rng.randint(0, min(1, max(0, worst - 1)))}") for _ in range(count)
        ]

    incident = [writer.say(f"line.{component}.{worst}") for _ in range(rng.choice((1, 1, 2)))] if worst else []
    lines = [*around(rng.randint(1, 5)), *incident, *around(rng.randint(0, 3))]
    if ending:
        lines += [writer.say(ending)]
    if ending != "ongoing":
        lines += [writer.say(f"line.{rng.choice(others)}.0") for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.3:  # without the levels' names
        lines = [line.split(" ", 1)[1] for line in lines]
    clock = rng.randint(0, 80000)
    stamped = []
    for line in lines:
        clock += rng.randint(1, 90)
        stamped.append(f"{clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02} {line}")
    recovered = ending == "recovered"
    asked = {
        "severity": score(writer, "ask.severity", 0 if recovered else worst, scale="severity"),
        "worst": score(writer, "ask.worst", worst, scale="severity"),
        "page": noul(writer, "ask.page", worst == 3 and not recovered),
    }
    if worst:
        asked["component"] = choice(writer, "ask.component", component, shuffled(writer, others), names="comp")
    if worst >= 2:
        asked["recovered"] = noul(writer, "ask.recovered", recovered)
    return Task("\n".join(stamped if rng.random() < 0.7 else lines), asked)


def review(writer: Writer) -> Task:
    """A product review: what is liked, what is not, and how it is overall."""
    rng = writer.rng
    aspects = kinds("good")
    mixed = shuffled(writer, aspects)
    plain = writer.split == "train" and rng.random() < 0.4  # to begin with
    count = rng.choice((0, 1, 1) if plain else (0, 1, 1, 2))
    liked, disliked = mixed[:count], mixed[count : count + rng.choice((0, 1, 1) if plain else (0, 1, 1, 2))]
    overall = rng.choice((0, 1, 2, 3, 4, None)) if liked or disliked else rng.randint(0, 4)
    good, bad = [writer.say(f"good.{kind}") for kind in liked], [writer.say(f"bad.{kind}") for kind in disliked]
    parts = [*good, *bad]
    if good and bad and rng.random() < 0.6:
        first, second = (good[0], bad[0]) if rng.random() < 0.5 else (bad[0], good[0])
        second = second if second.startswith(("I ", "I'")) else second[0].lower() + second[1:]
        joined = writer.say("join", a=_ended(first), b=_ended(second))
        parts = [joined, *good[1:], *bad[1:]]
    rng.shuffle(parts)
    of_others = shuffled(writer, aspects, *liked, *disliked)[0] if not plain and rng.random() < 0.5 else ""
    if of_others:
        parts.insert(rng.randint(0, len(parts)), writer.say("hearsay", aspect=_aspect(writer, of_others)))
    if overall is not None:
        parts.insert(rng.choice((0, len(parts))), writer.say(f"overall.{overall}"))
    if rng.random() < 0.6:
        parts.insert(0, writer.say("open"))
    asked = {}
    for name, these, those in (("like", liked, disliked), ("dislike", disliked, liked)):
        truth = these[0] if these else "nothing"
        rest = [*those, *shuffled(writer, aspects, *these, *those)]
        asked[name] = choice(
            writer,
            f"ask.{name}",
            truth,
            rest if truth == "nothing" or rng.random() < 0.7 else ["nothing", *rest],
            names="aspect",
        )
    kind = rng.choice([*disliked, *disliked, *liked, *shuffled(writer, aspects)[:2]])
    asked["complains"] = noul(writer, "ask.complains", kind in disliked, aspect=_aspect(writer, kind))
    # Who does not share others' complaints may like it.
    kind = rng.choice([*disliked, *liked, *liked, *shuffled(writer, aspects, of_others)[:2]])
    asked["praises"] = noul(writer, "ask.praises", kind in liked, aspect=_aspect(writer, kind))
    if overall is not None:
        asked["stars"] = score(writer, "ask.stars", overall, scale="stars")
        if overall != 2:
            asked["again"] = noul(writer, "ask.recommend", overall > 2)
    if writer.split == "train":
        others = shuffled(writer, aspects, *liked, *disliked, of_others)
        asked |= about_a_review(writer, liked, disliked, others, functools.partial(_aspect, writer))
    return Task(" ".join(_ended(part) for part in parts), asked)


def _aspect(writer: Writer, kind: str) -> str:
    """A noun for an aspect, without its article."""
    while (name := writer.say(f"aspect.{kind}")).startswith(("how ", "what ", "putting ", "getting ", "installing ")):
        pass
    return name.removeprefix("the ")


def expense(writer: Writer) -> Task:
    """An expense claim and the policy it is judged by."""
    rng = writer.rng
    category = rng.choice(("meal", "travel", "hotel", "tool", "meal", "travel", "private"))
    limit = rng.randint(12, 900) if writer.split == "train" and rng.random() < 0.5 else rng.choice(LIMITS)
    over, receipt, approved = rng.random() < 0.4, rng.random() < 0.6, rng.choice((True, False, None))
    amount = rng.randint(limit + 1, 3 * limit) if over else rng.randint(limit // 6, limit - 1)
    writer.values |= {"amount": writer.money(amount), "limit": writer.money(limit)}
    said = [writer.say(f"claim.{category}"), writer.say("receipt.yes" if receipt else "receipt.no")]
    if approved is not None:
        said.append(writer.say("approved.yes" if approved else "approved.no"))
    if rng.random() < 0.5:
        said.append(writer.say("chatter"))
    rng.shuffle(said)
    text, policy = " ".join(_ended(part) for part in said), writer.say("policy")
    broken = [
        kind for kind, is_so in (("limit", over), ("receipt", not receipt), ("private", category == "private")) if is_so
    ]
    asked = {
        "category": choice(writer, "ask.category", category, shuffled(writer, kinds("cat"), category), names="cat"),
        "receipt": noul(writer, "ask.receipt", receipt),
        "limit": noul(writer, "ask.limit", not over),
        "approved": noul(writer, "ask.approved", bool(approved)),
        "pay": noul(writer, "ask.pay", not broken),
    }
    if len(broken) < 2:
        truth = broken[0] if broken else "none"
        asked["reason"] = choice(writer, "ask.reason", truth, shuffled(writer, kinds("why"), truth), names="why")
    style = rng.random()
    if style < 0.2:
        return Task({"policy": policy, "claim": text}, asked)
    return Task(f"{policy}\n\nClaim: {text}" if style < 0.7 else f"Claim: {text}\n\n{policy}", asked)


def _ended(text: str) -> str:
    return text if text[-1] in ".!?" else text + "."


TASKS = {"support": support, "agent": agent, "logs": logs, "review": review, "expense": expense}
SHARES = {"support": 0.4, "agent": 0.17, "logs": 0.15, "review": 0.16, "expense": 0.12}
TRAINING_SHARES = {"support": 0.38, "agent": 0.11, "logs": 0.12, "review": 0.3, "expense": 0.09}  # reviews are hard
