"""From requests to streams and back. Light on purpose: a client that reads requests and decisions needs no torch."""

from typing import TYPE_CHECKING

from flide.lazy import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from flide.runtime.metadata import ForkMetadata, StreamCapacity, TrunkCache
    from flide.runtime.tree import TokenTree

__getattr__ = _lazy_exports(
    __name__,
    {
        "flide.runtime.metadata": ("ForkMetadata", "StreamCapacity", "TrunkCache"),
        "flide.runtime.tree": ("TokenTree",),
    },
)


__all__ = ["ForkMetadata", "StreamCapacity", "TokenTree", "TrunkCache"]
