"""PipeDream-2BW (Narayanan et al. 2020, section 3): 1F1B that is never flushed, over two versions of the weights.

    rank 0, p = 2, m = 2     call 0: F0 F1 B0   call 1: F2 B1 F3 B2   call 2: F4 B3 F5 B4 ...
                                                         ^ batch 0 is complete: its gradients are handed out in call 1

A batch is computed, forward and backward, with the weights that were current in its call (a copy, since the optimizer
changes them while it is in flight); its gradients are handed out one call later. So update t uses the gradients of
batch t-1 at the weights of call t-1: w[t+1] = w[t] - lr * g(w[t-1]). The first call hands out none. Ranks meet in
nothing but messages between neighbours; losses and gradients of shared parameters travel beside them and are waited
for one call later.

Needs as many micro-batches as ranks. `drain()` finishes what is in flight (before an evaluation, a save, the end); it
changes neither the weights nor what the next call hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfdist.errors import DistributedError
from hfdist.measure import wire
from hfdist.parallel.pipeline.apply import Shared
from hfdist.parallel.pipeline.stage import LABEL
from hfdist.parallel.pipeline.view import View
from hfdist.parallel.pipeline.wide import take_half_gradients

Watch = Callable[[int, str, int, bool], None]
_HEADER = 8  # most dimensions of a hidden state


@dataclass
class Flight:
    """One batch on this rank: its view (over a copy of the weights), and what has come of it."""

    view: View
    copies: dict[nn.Parameter, nn.Parameter]  # the model's -> this batch's
    kwargs: Sequence[dict[str, Any]]
    finish: Callable[[Any, int], Tensor]
    hidden: tuple[tuple[int, ...], torch.dtype]
    num_left: int
    scale: float
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    waits: list[Any] = field(default_factory=list)
    others: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (shared number, rank) -> its gradient


@dataclass
class _InFlight:
    batch: int
    received: Tensor | None
    output: Tensor


class Asynchronous:
    """The runner of one rank. `shared`: parameters that other ranks keep too."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        shared: Sequence[tuple[Shared, nn.Parameter]],
        *,
        set_number: Callable[[int], None],
        watch: Watch,
    ) -> None:
        self.group, self.device, self.shared = group, device, list(shared)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_batches = 0
        self.is_drained = True  # the same on all ranks, also on the last, which never has anything in flight
        self._set_number, self._watch = set_number, watch
        self._flights: dict[int, Flight] = {}
        self._in_flight: list[_InFlight] = []  # oldest first
        self._sends: list[tuple[Any, Tensor]] = []
        self._sent_before: list[tuple[Any, Tensor]] = []
        self._num_forwards = 0

    def run(self, flight: Flight) -> tuple[Tensor, int, Flight | None]:
        """Put in a batch: (loss, number of its batch, what to hand out), of the batch before it."""
        batch = self.num_batches
        self.num_batches += 1
        self.is_drained = False
        self._flights[batch] = flight
        self._expect(flight)
        for number in range(len(flight.kwargs)):
            self._forward(batch, number)
            if len(self._in_flight) > self.size - 1 - self.rank:
                self._backward()
        # What was sent in the call before has been asked for since: a rank is at most a batch ahead of another.
        for work, _ in self._sent_before:
            work.wait()
        self._sent_before, self._sends = self._sends, []
        if batch == 0:
            return self._loss_of(batch), batch, None
        before = self._flights.pop(batch - 1)
        assert not before.num_left, "as many micro-batches as ranks complete the batch before"
        for wait in before.waits:
            wait.wait()
        self._sum_shared(before)
        assert before.loss is not None
        return before.loss, batch - 1, before

    def drain(self) -> None:
        """Finish every backward that is in flight."""
        self.is_drained = True
        while self._in_flight:
            self._backward()
        for work, _ in [*self._sent_before, *self._sends]:
            work.wait()
        self._sent_before, self._sends = [], []

    # --- computations -----------------------------------------------------------------------------------------------

    def _forward(self, batch: int, number: int) -> None:
        flight = self._flights[batch]
        received = None
        if self.rank:
            received = self._receive(flight.hidden, self.rank - 1).requires_grad_()
        self._set_number(self._num_forwards)
        self._watch(self.rank, "F", self._num_forwards, True)
        output = flight.view(received, flight.kwargs[number])
        if flight.view.is_last:
            output = flight.finish(output, number)
        elif not output.requires_grad:
            output = output.detach().requires_grad_()
        self._watch(self.rank, "F", self._num_forwards, False)
        self._num_forwards += 1
        if not flight.view.is_last:
            self._send(output.detach().contiguous(), self.rank + 1)
        self._in_flight.append(_InFlight(batch, received, output))

    def _backward(self) -> None:
        oldest = self._in_flight.pop(0)
        flight = self._flights[oldest.batch]
        gradient = None
        if self.rank < self.size - 1:
            gradient = self._receive((tuple(oldest.output.shape), oldest.output.dtype), self.rank + 1)
        number = self._num_forwards - len(self._in_flight) - 1
        self._set_number(number)
        self._watch(self.rank, "B", number, True)
        torch.autograd.backward(oldest.output, gradient)
        self._watch(self.rank, "B", number, False)
        take_half_gradients(flight.copies.items(), flight.gradients)
        if oldest.received is not None:
            sent = oldest.received.grad
            self._send(torch.zeros_like(oldest.received) if sent is None else sent.contiguous(), self.rank - 1)
        flight.num_left -= 1
        if not flight.num_left:
            self._complete(flight)

    def _complete(self, flight: Flight) -> None:
        """All of a batch is done here: its gradients and its loss leave, unless they stay."""
        for parameter, copy in flight.copies.items():
            if copy.grad is not None:
                flight.gradients[parameter] = copy.grad
        flight.copies.clear()
        for entry, parameter in self.shared:
            if not parameter.requires_grad:
                continue
            mine = flight.gradients.get(parameter)
            flight.gradients[parameter] = torch.zeros_like(parameter) if mine is None else mine.contiguous()
            for peer in entry.ranks:
                if peer != self.rank:
                    self._post(flight.gradients[parameter], peer, "pipeline ties")
        if self.rank == self.size - 1:
            flight.loss = torch.stack([loss.to(torch.float64) for loss in flight.losses]).sum()
            for peer in range(self.size - 1):
                self._post(flight.loss, peer, "pipeline loss")

    def _loss_of(self, batch: int) -> Tensor:
        flight = self._flights[batch]
        if self.rank != self.size - 1:
            flight.waits.pop().wait()  # the loss is expected last
        assert flight.loss is not None
        return flight.loss

    def _sum_shared(self, flight: Flight) -> None:
        """Gradients of shared parameters, added in rank order so that all ranks have the same bits."""
        for number, (entry, parameter) in enumerate(self.shared):
            if not parameter.requires_grad:
                continue
            parts = {rank: flight.others[number, rank] for rank in entry.ranks if rank != self.rank}
            parts[self.rank] = flight.gradients[parameter]
            total = torch.zeros_like(parameter)
            for rank in entry.ranks:
                total += parts[rank]
            flight.gradients[parameter] = total

    # --- messages ---------------------------------------------------------------------------------------------------
    # Tags keep what travels beside the hidden states from being taken for one.

    def _expect(self, flight: Flight) -> None:
        """Post the receives of what is waited for one call later."""
        for number, (entry, parameter) in enumerate(self.shared):
            for peer in entry.ranks:
                if peer != self.rank and parameter.requires_grad:
                    part = torch.zeros_like(parameter)
                    flight.others[number, peer] = part
                    flight.waits.append(dist.irecv(part, group=self.group, group_src=peer, tag=1))
        if self.rank != self.size - 1:
            flight.loss = torch.zeros((), dtype=torch.float64, device=self.device)
            flight.waits.append(dist.irecv(flight.loss, group=self.group, group_src=self.size - 1, tag=2))

    def _post(self, tensor: Tensor, peer: int, label: str) -> None:
        wire.record("send", tensor.nbytes, group_size=2, label=label)
        tag = 2 if label == "pipeline loss" else 1
        self._sends.append((dist.isend(tensor, group=self.group, group_dst=peer, tag=tag), tensor))

    def _send(self, tensor: Tensor, peer: int) -> None:
        # The shape goes before: a wrong one would kill the process in the backend.
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        header[: tensor.ndim] = torch.tensor(tensor.shape)
        wire.record("send", header.nbytes, group_size=2, label="pipeline agreement")
        wire.record("send", tensor.nbytes, group_size=2, label=LABEL)
        for part in (header, tensor):
            self._sends.append((dist.isend(part, group=self.group, group_dst=peer), part))

    def _receive(self, hidden: tuple[tuple[int, ...], torch.dtype], peer: int) -> Tensor:
        shape, dtype = hidden
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=peer)
        got = tuple(header[: len(shape)].tolist())
        if got != shape:
            raise DistributedError(
                f"Got a hidden state {got} from pp={peer} on pp={self.rank}. Expected {shape}: the same batch on all "
                "ranks of a pipeline. Give them the same data: shard by data-parallel rank only."
            )
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor
