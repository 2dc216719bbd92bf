"""Fine-tuning decision models: LoRA adapters and heads, with each request's state shared by its questions."""

from typing import TYPE_CHECKING

from flide.lazy import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from flide.train.config import TrainConfig
    from flide.train.merged import merge
    from flide.train.run import BadRows, TrainResult, train
    from flide.train.trainer import Trainer

__getattr__ = _lazy_exports(
    __name__,
    {
        "flide.train.config": ("TrainConfig",),
        "flide.train.merged": ("merge",),
        "flide.train.run": ("BadRows", "TrainResult", "train"),
        "flide.train.trainer": ("Trainer",),
    },
)


__all__ = ["BadRows", "TrainConfig", "TrainResult", "Trainer", "merge", "train"]
