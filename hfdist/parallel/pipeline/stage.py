"""torch's `PipelineStage` around a view: which micro-batch runs, on which random stream, what is sent.

Guarantee: shapes and dtype are given, so nothing is inferred over the wire, and a hidden state that differs from them
is an error here instead of a wrong message in the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from hfdist.errors import DistributedError
from hfdist.measure import wire
from hfdist.parallel.pipeline.view import View

LABEL = "pipeline"  # of the bytes between stages, in `hfdist.measure.wire`


# What the last stage makes of the model's output: finish(output, micro_batch) -> the weighted loss.
Finish = Callable[[Any, int], Tensor]


class Runner(nn.Module):
    """What torch's stage calls: a view bound to the batch that runs now."""

    def __init__(self) -> None:
        super().__init__()
        self.view: View | None = None
        self.kwargs: Sequence[dict[str, Any]] = ()
        self.finish: Finish | None = None
        self.number = 0
        self.before: Callable[[], None] | None = None

    def forward(self, *received: Tensor) -> Tensor:
        """The hidden state for the next stage (rows, length, hidden), or the weighted loss ()."""
        view = self.view
        assert view is not None
        if self.before is not None:
            self.before()
        output = view(received[0] if received else None, self.kwargs[self.number])
        if not view.is_last:
            # Everything before may be frozen: the stages after send a gradient all the same.
            return output if output.requires_grad else output.detach().requires_grad_()
        assert self.finish is not None
        return self.finish(output, self.number)


class Stage(PipelineStage):
    """Model stage `index`. `begin(stage, micro_batch)` is called as a computation starts, `end` as it ends."""

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        hidden: tuple[tuple[int, ...], torch.dtype],
        device: torch.device,
        group: dist.ProcessGroup,
        watch: Callable[[int, str, int, bool], None] | None = None,
    ) -> None:
        meta = torch.empty(hidden[0], dtype=hidden[1], device="meta", requires_grad=True)
        runner = Runner()
        outputs = torch.empty((), dtype=hidden[1], device="meta", requires_grad=True)
        super().__init__(
            runner,
            index,
            num_stages,
            device,
            input_args=meta if index else torch.empty(0, device="meta"),
            output_args=meta if index < num_stages - 1 else outputs,
            group=group,
        )
        self.runner = runner
        self._hidden = hidden
        self._watch = watch

    def bind(self, view: View, kwargs: Sequence[dict[str, Any]], finish: Finish) -> None:
        """Run this batch next."""
        self.runner.view, self.runner.kwargs, self.runner.finish = view, kwargs, finish

    def release(self) -> None:
        """Forget the batch and everything computed for it."""
        self.clear_runtime_states()
        self.runner.view, self.runner.kwargs, self.runner.finish = None, (), None
        self.runner.before = None
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """As torch's, with the micro-batch looked up by its number; a model's own error comes out as it is."""
        self.runner.number = fwd_chunk_id
        self._tell("F", fwd_chunk_id, True)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, (), None, save_forward_output)
        except RuntimeError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        if not self.is_last and (tuple(output.shape), output.dtype) != self._hidden:
            raise DistributedError(
                f"Got a hidden state {tuple(output.shape)} {output.dtype} after pipeline stage {self.stage_index}. "
                f"Expected {self._hidden[0]} {self._hidden[1]}, as before its first block. Use blocks that keep the "
                "shape and dtype of the hidden state."
            )
        self._tell("F", fwd_chunk_id, False)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """As torch's; the micro-batch is known to what recomputes activations."""
        kind = "B" if full_backward else "I"
        self.runner.number = bwd_chunk_id
        self._tell(kind, bwd_chunk_id, True)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._tell(kind, bwd_chunk_id, False)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """As torch's."""
        self.runner.number = bwd_chunk_id
        self._tell("W", bwd_chunk_id, True)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._tell("W", bwd_chunk_id, False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, counted."""
        return _counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, counted."""
        return _counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _tell(self, kind: str, number: int, begins: bool) -> None:
        if self._watch is not None:
            self._watch(self.stage_index, kind, number, begins)


def _counted(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    for op in ops:
        op.tensor = op.tensor.contiguous()  # gloo refuses others
        wire.record("send", op.tensor.nbytes, group_size=2, label=LABEL)
    return ops
