"""From a planned round to its stream: what checkpoints cover is left out, and states that several requests have are
computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flide.runtime.capacity import needed_by
from flide.runtime.checkpoints.radix import TOKEN_BYTES, common_tokens
from flide.runtime.checkpoints.store import Checkpoint, CheckpointStore, StoredRound, Trunk
from flide.runtime.metadata import MAX_SAVES, StreamCapacity
from flide.runtime.plan import RoundPlan
from flide.runtime.tree import TreeLayout


@dataclass(frozen=True, slots=True)
class ResumedRound:
    """A round as it runs.

    Attributes:
        layouts: a tree for each group of requests, without what its checkpoint covers.
        needed: by all of them.
        stored: what they resume from and save.
        groups: the requests of each tree, in the order of their rows.
        reused: of each request, tokens that are not computed for it.
    """

    layouts: list[TreeLayout]
    needed: StreamCapacity
    stored: StoredRound
    groups: list[list[int]]
    reused: list[int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests that become one tree with a trunk of ``length`` tokens, and what it resumes from."""

    members: list[int]
    length: int
    source: Checkpoint | None


def resume(store: CheckpointStore, plan: RoundPlan) -> ResumedRound:
    """Lay out a round that was planned with the store."""
    for index, source in enumerate(plan.sources):
        if source is not None and source.gone:  # of a round that went wrong after this one was planned
            plan.release(index)
    requests, layouts, trunks, groups, reused = plan.requests, [], [], [], [0] * len(plan.requests)
    for group in _groups(store, plan):
        members = [requests[index] for index in group.members]
        layout = members[0].layout
        if len(members) > 1:
            layout = TreeLayout.merged([member.layout for member in members], group.length)
        saves = sorted({length for member in members for length in member.reuse.saves if length <= group.length})
        key = plan.keys[group.members[0]][: group.length * TOKEN_BYTES]
        trunk = Trunk(key, members[0].reuse.salt, tuple(saves[-MAX_SAVES:]), group.source)
        layouts.append(layout.resumed(trunk.resumed) if trunk.resumed else layout)
        trunks.append(trunk)
        groups.append(group.members)
        for index in group.members:
            reused[index] = trunk.resumed if index == group.members[0] else group.length
    needed = needed_by(layouts[0], cached=trunks[0].resumed)
    for layout, trunk in zip(layouts[1:], trunks[1:], strict=True):
        needed = needed + needed_by(layout, cached=trunk.resumed)
    return ResumedRound(layouts, needed, store.begin(trunks), groups, reused)


def _groups(store: CheckpointStore, plan: RoundPlan) -> list[_Group]:
    """Requests of one salt with the same state, where putting them together saves rows, and all others alone."""
    states = [
        (x.reuse.salt, key[: x.reuse.state_tokens * TOKEN_BYTES])
        for x, key in zip(plan.requests, plan.keys, strict=True)
    ]
    ends = [(salt, len(state), state[-16 * TOKEN_BYTES :]) for salt, state in states]
    counts = Counter(ends)
    alike: dict[tuple[str | None, bytes], list[int]] = {}
    together: list[list[int]] = []
    for index, request in enumerate(plan.requests):
        # Most states differ at their ends: only of the others all is hashed.
        if counts[ends[index]] > 1 and states[index][1] and request.layout.depth > 1:
            members = alike.setdefault(states[index], [])
            members.append(index)
            if len(members) > 1:
                continue
        else:
            members = [index]
        together.append(members)
    return [group for members in together for group in _merged(store, plan, members)]


def _merged(store: CheckpointStore, plan: RoundPlan, members: Sequence[int]) -> list[_Group]:
    alone = [_Group([i], plan.requests[i].layout.trunk_length, plan.sources[i]) for i in members]
    if len(members) == 1:
        return alone
    length = min(common_tokens(plan.keys[members[0]], plan.keys[i]) for i in members)
    sources = [x.source for x in alone if x.source is not None]
    usable = [source for source in sources if source.length <= length]
    source = max(usable, key=lambda x: x.length, default=None)
    rows = length - (0 if source is None else source.length)
    for group in alone:
        layout = plan.requests[group.members[0]].layout
        num_branches = layout.level_nodes[2] - layout.level_nodes[1]
        rows += num_branches * (group.length - length)
    if rows >= sum(x.length - (0 if x.source is None else x.source.length) for x in alone):
        return alone
    kept = False  # one of the pins that the source has
    for i in members:
        if plan.sources[i] is source and not kept:
            kept = True
        else:
            plan.release(i)
    return [_Group([*members], length, source)]


__all__ = ["ResumedRound", "resume"]
