"""CudaRunner: computes plans on a GPU. The device picks greedy tokens and the candidates of draws; the host draws.

A plan's per-step values go up in one copy. Decode steps replay a graph captured for exactly their batch size, and steps
with prompt rows one for exactly their shape once it comes again; what a graph cannot do is computed by the same calls,
eagerly. A greedy row brings 4 bytes back, a drawn one its candidates, a top_k beyond the device's widest its whole row.

A plan made ahead (engine.scheduler.Plan.ahead) is queued behind the one before it, while that computes: argmax leaves
its tokens where the next step reads token ids, so only the other values go up. Two lanes of host memory take turns,
because the copies of a queued step have not been made yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config.sampling import SamplingParams
from crucible.engine.batch import Batch
from crucible.engine.graphs import PREFILL_GRAPHS, Graphs
from crucible.engine.lane import Lane
from crucible.engine.model_runner import LogitsHook, sampled_requests
from crucible.engine.request import Request
from crucible.engine.sampler import Sampler
from crucible.engine.scheduler import Plan
from crucible.errors import EngineError
from crucible.kernels.table import MAX_TOP_K
from crucible.model.cuda_ops import DeviceBatch
from crucible.model.forward import forward
from crucible.native.batch import NO_TOKEN
from crucible.native.sampling import draw

IDS_A_BLOCK = 4096  # of the vocabulary, in the kernels that choose


@dataclass(frozen=True)
class Shape:
    """What a captured graph depends on: rows, of them one a request that decodes, tiles of prompts, rows of logits."""

    rows: int
    decode_rows: int
    tiles: int
    wanted: int


@dataclass
class Flight:
    """A queued plan. width: candidates of a row; logits: on the host once it is done, if they are wanted there."""

    plan: Plan
    lane: Lane
    width: int
    done: Any
    logits: NDArray[np.float32] | None


class CudaRunner:
    """Runs plans through the forward pass on ``device`` (a CudaDevice, or what tests put in its place).

    max_rows: rows of the largest plan; max_sequences: its requests; context: most tokens of one. graphs,
    prefill_graphs: replay decode steps, and steps with prompt rows. device_argmax, device_top_k: choose on the device;
    without, rows of logits come to the host.
    ``on_logits``, if set, gets the requests that get a token and their rows on the host, before any token is chosen.
    """

    def __init__(
        self,
        weights: Any,
        ops: Any,
        cache: Any,
        *,
        device: Any,
        max_rows: int,
        max_sequences: int,
        context: int,
        token_count: int,
        graphs: bool = True,
        prefill_graphs: bool = True,
        device_argmax: bool = True,
        device_top_k: bool = True,
    ) -> None:
        self.weights, self.ops, self.cache, self.device = weights, ops, cache, device
        self.token_count = token_count
        self.on_logits: LogitsHook | None = None
        self.device_argmax, self.device_top_k = device_argmax, device_top_k
        self._lanes = [Lane(device, max_rows, max_sequences, context) for _ in range(2)]
        self._lane = self._lanes[0]
        self._flights: deque[Flight] = deque()
        self._launching = False
        self._memory = device.zeros(len(self.batch.memory), np.int32)
        # argmax writes where the embedding reads: the token ids of a next step that is queued already.
        self._tokens = self._memory[:max_sequences]
        self._blocks = -(-token_count // IDS_A_BLOCK)
        self._flags = device.zeros(max_sequences, np.int32)
        self._partials = device.zeros((max_sequences, self._blocks, MAX_TOP_K), np.uint64)
        self._counters = device.zeros(max_sequences, np.uint32)
        self._ids = device.zeros((max_sequences, MAX_TOP_K), np.int32)
        self._values = device.zeros((max_sequences, MAX_TOP_K), np.float32)
        self._host_ids = device.pinned((max_sequences, MAX_TOP_K), np.int32)
        self._host_values = device.pinned((max_sequences, MAX_TOP_K), np.float32)
        self._graphs = Graphs(device.capture, limit=max_sequences) if graphs else None
        self._prefill_graphs = Graphs(device.capture, limit=PREFILL_GRAPHS, sightings=2) if prefill_graphs else None
        self._sampler = Sampler(token_count)
        self._logits: Any = None

    @property
    def batch(self) -> Batch:
        """That of the plan launched last."""
        return self._lane.batch

    @property
    def device_name(self) -> str:
        """What the GPU calls itself."""
        return str(self.device.name)

    @property
    def overlaps(self) -> bool:
        """Whether plans made ahead can be launched: their tokens never leave the device before they are read."""
        return self.device_argmax

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """Those of the last plan, on the host."""
        return None if self._logits is None else self.device.download(self._logits)

    def launch(self, plan: Plan) -> None:
        if not plan.ahead and self._flights:
            raise EngineError("a plan is in flight: collect it before the next launch")
        if plan.ahead and not (len(self._flights) == 1 and self._follows(plan, self._flights[0].plan)):
            raise EngineError("a plan made ahead must follow one plan in flight, of the same greedy requests")
        if self._launching:  # the last launch was interrupted, and what it queued may still read a lane
            self.device.synchronize()
        self._launching = True
        lane = self._lanes[bool(self._flights) and self._flights[0].lane is self._lanes[0]]
        batch = lane.batch
        batch.fill(plan.decode, plan.prefill, plan.counts, ahead=plan.ahead)
        tiles = lane.cut(len(plan.decode))
        width = self._choose_width(lane)
        begin = batch.places["positions"] if plan.ahead else 0  # the token ids before them are there already
        end = batch.places["page_tables"] + len(batch.page_tables) * batch.max_pages
        self.device.to_device(batch.memory[begin:end], self._memory[begin:end])
        shape = Shape(len(batch.token_ids), len(plan.decode), tiles, len(batch.logit_rows))
        self._compute(shape, lane)
        self._select(lane, shape.wanted, width)
        self._lane = lane
        logits = self._bring_logits(shape.wanted)
        self._flights.append(Flight(plan, lane, width, self.device.mark(), logits))
        self._launching = False

    def collect(self) -> NDArray[np.int32]:
        if not self._flights:
            raise EngineError("no plan is in flight")
        flight = self._flights.popleft()
        self.device.wait(flight.done)
        batch = flight.lane.batch
        count = len(batch.logit_rows)
        if self.on_logits is not None and flight.logits is not None:
            self._show(flight.plan, flight.logits)
        if not count:
            return np.empty(0, np.int32)
        if not self.device_argmax:
            assert flight.logits is not None
            return self._sampler.pick(flight.logits, batch)
        tokens: NDArray[np.int32] = flight.lane.tokens[:count].copy()
        if batch.temperatures.any():
            for row in np.flatnonzero((batch.temperatures > 0) & (tokens != NO_TOKEN)):
                tokens[row] = self._draw(flight, int(row))
        return tokens

    def abandon(self) -> None:
        """Wait for what is in flight and forget it. Its pages hold KV of the same tokens, or get it again."""
        self.device.synchronize()
        self._flights.clear()

    def warm_up(self) -> None:
        """Compute two short prompts over page 0, which must be free, and capture the graphs of decode steps."""
        for count in (min(8, self.batch.max_rows), 1):
            request = Request("warm-up", np.zeros(count, np.int32), 1, SamplingParams(max_tokens=1, temperature=1.0))
            request.assign_pages([0])
            self.launch(Plan([], [request], [count]))
            self.collect()
        if self._graphs is not None:
            for rows in range(1, self.batch.max_sequences + 1):
                self._graph(self._graphs, Shape(rows, rows, 0, rows))
            self.device.synchronize()
        self._logits = None

    # ---- the step

    @staticmethod
    def _follows(plan: Plan, before: Plan) -> bool:
        return not before.prefill and not plan.prefill and plan.decode == before.decode

    def _view(self, shape: Shape) -> DeviceBatch:
        """The device's copy of the batch. It holds addresses and sizes only, so it fits every step of that shape."""
        batch, at = self.batch, self.batch.places

        def part(name: str, count: int, skip: int = 0) -> Any:
            return self._memory[at[name] + skip : at[name] + skip + count]

        return DeviceBatch(
            token_ids=part("token_ids", shape.rows),
            positions=part("positions", shape.rows),
            row_sequence=part("row_sequence", shape.rows),
            page_tables=part("page_tables", batch.max_sequences * batch.max_pages).reshape(-1, batch.max_pages),
            logit_rows=part("logit_rows", shape.wanted),
            tile_first=part("spare", shape.tiles),
            tile_rows=part("spare", shape.tiles, batch.max_rows),
            decode_rows=shape.decode_rows,
            splits=self.ops.decode_splits(shape.decode_rows),
        )

    def _compute(self, shape: Shape, lane: Lane) -> None:
        graphs = self._graphs if shape.rows == shape.decode_rows else self._prefill_graphs
        captured = None if graphs is None else self._graph(graphs, shape)
        if captured is None:
            self._forward(shape)
        else:
            self.device.replay(captured)
            self._logits = self.ops.logit_rows(shape.wanted)

    def _graph(self, graphs: Graphs, shape: Shape) -> Any | None:
        return graphs.get(shape, lambda: self._forward(shape))

    def _forward(self, shape: Shape) -> None:
        """The model, and the greedy choice of every row."""
        self._logits = forward(self.weights, self.ops, self._view(shape), self.cache)
        rows = shape.wanted
        if rows and self.device_argmax:
            self.device.launch(
                "crucible_argmax", (self._blocks, rows), self._logits, self._logits.shape[1], self.token_count,
                self._partials, self._counters, 1, self._tokens, self._flags,
            )  # fmt: skip

    def _choose_width(self, lane: Lane) -> int:
        """The most candidates that a row of this step needs from the device; 0 without a draw."""
        batch, count = lane.batch, len(lane.batch.logit_rows)
        if not self.device_top_k or not self.device_argmax or not batch.temperatures.any():
            lane.top_ks[:count] = 0
            return 0
        wanted = np.where(batch.temperatures > 0, np.minimum(batch.top_ks, self.token_count), 0)
        wanted[wanted > MAX_TOP_K] = 0
        lane.top_ks[:count] = wanted
        return int(wanted.max(initial=0))

    def _select(self, lane: Lane, rows: int, width: int) -> None:
        """Queues the choice of candidates and the copies of results."""
        if not rows or not self.device_argmax:
            return
        self.device.to_host(self._tokens[:rows], lane.tokens[:rows])
        if width:
            at = lane.batch.places["spare"] + 2 * lane.batch.max_rows
            # Rows lie max_k apart: the width of this step, so that one copy brings no more than is wanted.
            self.device.launch(
                "crucible_top_k", (self._blocks, rows), self._logits, self._logits.shape[1], self.token_count,
                self._memory[at : at + rows], width, self._partials, self._counters, self._ids, self._values,
                self._flags,
            )  # fmt: skip
            size = rows * width
            self.device.to_host(self._ids.reshape(-1)[:size], self._host_ids.reshape(-1)[:size])
            self.device.to_host(self._values.reshape(-1)[:size], self._host_values.reshape(-1)[:size])

    def _bring_logits(self, rows: int) -> NDArray[np.float32] | None:
        """Queues a copy of the step's logits, if the host wants them: the next step overwrites them."""
        if not rows or (self.on_logits is None and self.device_argmax):
            return None
        host: NDArray[np.float32] = self.device.pinned(self._logits.shape, np.float32)
        self.device.to_host(self._logits, host)
        return host

    def _show(self, plan: Plan, logits: NDArray[np.float32]) -> None:
        requests, rows = sampled_requests(plan), plan.surviving()
        if rows is not None:
            requests, logits = [requests[row] for row in rows], logits[rows]
        assert self.on_logits is not None
        self.on_logits(requests, logits)

    def _draw(self, flight: Flight, row: int) -> int:
        batch = flight.lane.batch
        k = int(flight.lane.top_ks[row])
        if not k:  # wider than the device selects; a step with draws has none queued behind it
            return self._sampler.pick_row(self.device.download(self._logits[row]), batch, row)
        at = row * flight.width
        ids, values = self._host_ids.reshape(-1)[at : at + k], self._host_values.reshape(-1)[at : at + k]
        return draw(
            ids, values, float(batch.temperatures[row]), int(batch.seeds[row]), int(batch.choices[row]),
            int(batch.draw_positions[row]),
        )  # fmt: skip
