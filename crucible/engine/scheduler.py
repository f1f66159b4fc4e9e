"""Scheduler: which requests get work in the next step. It knows no clock, no device and no model.

The order of a request's life: ``add`` queues it, a ``plan`` admits it (pages for its whole life, or it waits), plans
compute its prompt in chunks and then one token each, ``commit`` records what a plan produced, and the request retires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crucible.config.sampling import SamplingParams
from crucible.engine.kv_cache import KVPages
from crucible.engine.messages import FinishReason
from crucible.engine.request import Request, RequestState, prompt_array
from crucible.errors import QueueFullError, RequestError
from crucible.native.batch import BROKEN, PAGE_TOKENS, STOPPED, advance, pages_for, wasted_slots


@dataclass(slots=True)
class Plan:
    """One step: a row for each request of ``decode``, then ``counts[i]`` prompt rows for ``prefill[i]``.

    Those whose last known token is among their rows get a token: every decode row, and the last row of a prompt.
    ahead: made before the plan before it was recorded. Its requests may have ended by then: see ``surviving``.
    """

    decode: list[Request]
    prefill: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ahead: bool = False

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    def surviving(self) -> list[int] | None:
        """Of a plan made ahead: the rows whose requests go on, or None if all do."""
        if not self.ahead:
            return None
        rows = [row for row, request in enumerate(self.decode) if request.state is not RequestState.FINISHED]
        return None if len(rows) == len(self.decode) else rows


class Scheduler:
    """First come, first served, bounded by ``max_batch`` resident requests and the pages of the pool.

    max_queue: live requests allowed beyond ``max_batch``. context: most tokens (prompt + generated) of a request.
    prefill_budget: prompt tokens a plan, over all requests; prefill_chunk_tokens: the same for one request.
    min_packed: prompts that a plan must reach to compute several at once; a plan that reaches fewer computes the first
    alone (2 packs always; more than ``max_batch`` never). token_count: ids below it may be input. eos_token_ids: ids
    that end a request.

    Admission is first come, first served; the admitted prompts take turns: those a plan reached and did not finish go
    to the back. So each of them, unless cancelled, gets work within R plans of its admission and of its last turn:
    R = ceil(max_batch / max(1, prefill_budget // chunk)), chunk being the smaller of prefill_chunk_tokens and
    prefill_budget; R = max_batch with a ``min_packed`` above 2. That bounds progress, not time.

    Not thread-safe. ``waiting`` and ``running`` are in order of arrival and of the first token, ``prefilling`` in the
    order of turns; for reading only.
    """

    def __init__(
        self,
        pages: KVPages,
        *,
        max_batch: int,
        max_queue: int,
        context: int,
        prefill_budget: int,
        token_count: int,
        prefill_chunk_tokens: int | None = None,
        min_packed: int = 2,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.pages = pages
        self.max_batch = max_batch
        self.max_queue = max_queue
        self.context = context
        self.prefill_budget = prefill_budget
        self.chunk = min(prefill_chunk_tokens or prefill_budget, prefill_budget)
        self.min_packed = min_packed
        self.token_count = token_count
        self.eos_ids = np.array(eos_token_ids, np.int32)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._cancelled: list[Request] = []
        self._finished: list[Request] = []

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        *,
        choice: int = 0,
        arrival: float = 0.0,
        cache_salt: str | None = None,
    ) -> Request:
        """Queue a request. ``params.max_tokens`` of None means up to the context.

        Raises RequestError naming the parameter for what can never be served, QueueFullError for what may be later.
        """
        prompt = prompt_array(token_ids, self.token_count)
        max_tokens = self._room(len(prompt), params.max_tokens)
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use; give each live request its own", "request_id")
        if len(self._live) >= self.max_batch + self.max_queue:
            raise QueueFullError(
                f"the queue is full ({self.max_batch} resident and {self.max_queue} waiting requests); try again later"
            )
        request = Request(request_id, prompt, max_tokens, params, choice=choice, arrival=arrival, cache_salt=cache_salt)
        self._live[request_id] = request
        self.waiting.append(request)
        return request

    def _room(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens the request may generate. Raises RequestError when prompt and answer fit neither context nor pool."""
        capacity = self.pages.total * PAGE_TOKENS
        if prompt_tokens >= min(self.context, capacity):
            bound = f"the context of {self.context}" if self.context <= capacity else f"the KV cache of {capacity}"
            raise RequestError(f"the prompt of {prompt_tokens} tokens leaves no room in {bound} tokens", "prompt")
        wanted = self.context - prompt_tokens if max_tokens is None else max_tokens
        asked = f"max_tokens {wanted}" if max_tokens is not None else f"max_tokens (none given, so {wanted})"
        if prompt_tokens + wanted > self.context:
            raise RequestError(
                f"{asked} plus {prompt_tokens} prompt tokens exceed the context of {self.context}; "
                f"at most {self.context - prompt_tokens} fit",
                "max_tokens",
            )
        if pages_for(prompt_tokens + wanted) > self.pages.total:
            raise RequestError(
                f"{asked} plus {prompt_tokens} prompt tokens exceed the KV cache of {capacity} tokens; "
                f"at most {capacity - prompt_tokens} fit",
                "max_tokens",
            )
        return wanted

    def cancel(self, request_id: str) -> bool:
        """Withdraw a request: at once while it waits, else when the next plan is made. False if it is not live."""
        request = self._live.get(request_id)
        if request is None or request.cancelled:
            return False
        request.cancelled = True
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self._retire(request, "cancelled")
        else:
            self._cancelled.append(request)  # a step in flight may still read its pages
        return True

    def plan(self) -> Plan:
        """The next step's work. Its rows are at most ``max_batch + prefill_budget``; empty when there is none."""
        self._withdraw()
        self._admit()
        plan = Plan(self.running.copy())
        budget = self.prefill_budget
        for request in self.prefilling:
            count = min(request.remaining, self.chunk, budget)
            if count == 0:
                break
            plan.prefill.append(request)
            plan.counts.append(count)
            budget -= count
        if len(plan.prefill) < self.min_packed:
            del plan.prefill[1:], plan.counts[1:]
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step after ``plan``, which computes, if none of its results can matter to it but the tokens themselves.

        That is a decode step of greedy requests, of which none is at its limit, while nothing else could begin. A
        request that ``plan`` ends (eos, or no token) is then computed once too often, within its own pages: what
        takes these over is computed later. None: wait for ``plan``.
        """
        if plan.prefill or self.prefilling or self._cancelled or plan.decode != self.running:
            return None
        if self.waiting and len(self.running) < self.max_batch:
            return None
        if any(request.temperature or request.length + 1 >= request.limit for request in plan.decode):
            return None
        return Plan(plan.decode, ahead=True)

    def settle(self, plan: Plan, token_ids: NDArray[np.int32]) -> tuple[Plan, NDArray[np.int32]]:
        """A plan made ahead, and its tokens, without the rows of requests that have ended or been cancelled."""
        self._withdraw()
        rows = plan.surviving()
        if rows is None:
            return plan, token_ids
        return Plan([plan.decode[row] for row in rows], ahead=True), token_ids[rows]

    def commit(self, plan: Plan, token_ids: NDArray[np.int32]) -> list[Request]:
        """Record a computed plan: ``token_ids`` int32, one for each request that had logits, in the plan's order.

        Returns the requests that got a token: all of those, except where NO_TOKEN says that there was none to choose.
        The ones that ended (eos, length, or for want of a token) have retired and given their pages back.
        """
        sampled, ended = advance(plan.decode, plan.prefill, plan.counts, token_ids, self.eos_ids)
        self.pages.prefix.publish(plan.decode, plan.prefill)  # before anyone retires: a page without content is freed
        if plan.prefill:
            unfinished = []
            for request in plan.prefill:
                if request.generated:
                    request.state = RequestState.RUNNING
                    self.running.append(request)
                else:
                    unfinished.append(request)
            self.prefilling = self.prefilling[len(plan.prefill) :] + unfinished
        for request in ended:
            if request.finish_code == BROKEN:
                self._break(request)
            else:
                self._retire(request, "stop" if request.finish_code == STOPPED else "length")
        if ended:
            self._sweep()
        return sampled

    def take_finished(self) -> list[Request]:
        """The requests that finished since the last call, in the order in which they did."""
        finished, self._finished = self._finished, []
        return finished

    def fail(self) -> None:
        """End every live request with reason ``error``. For an engine that will plan no more."""
        for request in list(self._live.values()):
            self._retire(request, "error")
        self.waiting.clear()
        self._cancelled.clear()
        self._sweep()

    @property
    def live(self) -> int:
        """Requests that wait or are resident."""
        return len(self._live)

    @property
    def has_work(self) -> bool:
        """Whether a plan, or ``take_finished``, would yield something."""
        return bool(self._live or self._finished)

    @property
    def wasted_slots(self) -> int:
        """Token slots that resident requests have reserved and not filled yet."""
        return wasted_slots(self.prefilling) + wasted_slots(self.running)

    def check(self) -> None:
        """Raises RuntimeError unless the pool's references are those of the resident requests."""
        self.pages.check((*self.prefilling, *self.running))

    def _withdraw(self) -> None:
        if self._cancelled:
            for request in self._cancelled:
                if request.state is not RequestState.FINISHED:
                    self._retire(request, "cancelled")
            self._cancelled.clear()
            self._sweep()

    def _admit(self) -> None:
        """Move waiting requests in while there is room. The first that must wait holds back those behind it."""
        while self.waiting and len(self.running) + len(self.prefilling) < self.max_batch:
            request = self.waiting[0]
            if not self.pages.reserve(request):
                break
            self.waiting.popleft()
            request.state = RequestState.PREFILLING
            self.prefilling.append(request)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """The one way out: pages back, and the request is reported by ``take_finished``."""
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self.pages.release(request)
        del self._live[request.request_id]
        self._finished.append(request)

    def _break(self, request: Request) -> None:
        """End a request whose logits no token can be chosen from; its neighbours go on."""
        request.error = f"the model's logits after {request.length} tokens of this request hold NaN or infinity"
        self.pages.prefix.forget(request)
        self._retire(request, "error")

    def _sweep(self) -> None:
        self.prefilling = [request for request in self.prefilling if request.state is RequestState.PREFILLING]
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]
