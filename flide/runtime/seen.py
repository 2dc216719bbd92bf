"""What came before: so much of what is sent never comes again that only what does is worth keeping."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Seen"]


class Seen(set[int]):
    """Hashes of what came once.

    Args:
        most: that are remembered; then it begins anew.
    """

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def again(self, item: Hashable) -> bool:
        """Whether an item came before; from now on it did."""
        number = hash(item)
        if number in self:
            return True
        if len(self) >= self._most:
            self.clear()
        self.add(number)
        return False
