"""The batch of one training step, by task."""

from metapeak.tracer.batches.images import image_shape
from metapeak.tracer.batches.tasks import TASKS, Batch, make_batch, sum_of_features

__all__ = ["TASKS", "Batch", "image_shape", "make_batch", "sum_of_features"]
