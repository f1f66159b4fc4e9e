"""Scheduler, KVPages, PrefixCache and PagePool under random arrivals, cancellations, faults and steps.

The fake device stores in each slot which tokens lead up to it, and looks at every slot a row may read.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crucible.config import SamplingParams
from crucible.config.engine import PAGE_TOKENS
from crucible.engine.kv_cache import KVPages
from crucible.engine.request import Request, RequestState
from crucible.engine.scheduler import Plan, Scheduler
from crucible.errors import QueueFullError, RequestError
from crucible.native.batch import NO_TOKEN

EOS, CONTEXT, BATCH, QUEUE = 5, 120, 4, 4
STEMS = [np.random.default_rng(seed).integers(0, 31, CONTEXT + 20).tolist() for seed in range(2)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        cache=st.booleans(),
        pages=st.integers(8, 20),
        budget=st.integers(1, 40),
        chunk=st.none() | st.integers(1, 40),
        packed=st.sampled_from([2, 2, 3, BATCH + 1]),
    )
    def start(self, cache: bool, pages: int, budget: int, chunk: int | None, packed: int) -> None:
        self.s = Scheduler(
            KVPages(pages, prefix_cache=cache), max_batch=BATCH, max_queue=QUEUE, context=CONTEXT,
            prefill_budget=budget, prefill_chunk_tokens=chunk, min_packed=packed, token_count=31, eos_token_ids=[EOS],
        )  # fmt: skip
        self.room = min(CONTEXT, pages * PAGE_TOKENS)
        self.all: dict[str, tuple[Request, int | None]] = {}
        self.plan: Plan | None = None
        self.kv: dict[tuple[int, int], tuple[str | None, bytes]] = {}
        self.waited: dict[str, int] = {}
        self.patience = BATCH if packed > 2 else math.ceil(BATCH / max(1, budget // self.s.chunk))

    @rule(
        stem=st.integers(0, 1),
        prompt=st.integers(1, CONTEXT + 10) | st.sampled_from([16, 32, 48, 64]),
        tail=st.just([]) | st.lists(st.integers(0, 30), max_size=3),
        max_tokens=st.none() | st.integers(1, 60),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, stem: int, prompt: int, tail: list[int], max_tokens: int | None, salt: str | None) -> None:
        self.submit(STEMS[stem][:prompt] + tail, max_tokens, salt)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), more=st.integers(0, 20), salt=st.sampled_from([None, "s"]))
    def go_on(self, data: st.DataObject, more: int, salt: str | None) -> None:
        """A prompt that holds an earlier prompt and its answer."""
        request, _ = self.all[data.draw(st.sampled_from(sorted(self.all)))]
        self.submit(request.tokens[: request.length].tolist() + [7] * more, 4, salt)

    def submit(self, ids: list[int], max_tokens: int | None, salt: str | None) -> None:
        name = str(len(self.all))
        total = len(ids) + max_tokens if max_tokens else CONTEXT
        try:
            request = self.s.add(name, ids, SamplingParams(max_tokens=max_tokens), cache_salt=salt)
        except RequestError:
            assert len(ids) >= self.room or total > self.room
        except QueueFullError:
            assert self.s.live == BATCH + QUEUE
        else:
            assert len(ids) < self.room
            assert total <= self.room
            self.all[name] = (request, max_tokens)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.all)))
        request, _ = self.all[name]
        live = request.state is not RequestState.FINISHED and not request.cancelled
        assert self.s.cancel(name) == live

    @precondition(lambda self: self.plan is None)
    @rule()
    def launch(self) -> None:
        self.plan = plan = self.s.plan()
        assert sum(plan.counts) <= self.s.prefill_budget
        assert all(0 < count <= self.s.chunk for count in plan.counts)
        assert len(plan.prefill) < 2 or len(plan.prefill) >= self.s.min_packed
        assert len(self.s.running) + len(self.s.prefilling) <= BATCH
        assert all(not r.cancelled and r.state is RequestState.PREFILLING for r in plan.prefill)
        assert all(not r.cancelled and r.state is RequestState.RUNNING for r in plan.decode)
        assert bool(plan) == bool(self.s.live)  # whoever is alive can move
        assert plan.decode == self.s.running
        for request in self.s.prefilling:
            self.waited[request.request_id] = self.waited.get(request.request_id, 0) + 1
            if request in plan.prefill:
                self.waited[request.request_id] = 0
            assert self.waited[request.request_id] < self.patience
        work = [(r, 1) for r in plan.decode] + list(zip(plan.prefill, plan.counts, strict=True))
        for request, count in work:
            self.store(request, count)
        for request, count in work:
            for position in range(request.computed + count):
                assert self.kv.get(slot(request, position)) == history(request, position)

    def store(self, request: Request, count: int) -> None:
        for position in range(request.computed, request.computed + count):
            page, offset = slot(request, position)
            assert self.s.pages.pool.references(page) == 1
            assert self.s.pages.pool.tokens(page) is None
            self.kv[page, offset] = history(request, position)

    @precondition(lambda self: self.plan is not None)
    @rule(tokens=st.lists(st.sampled_from([1, 2, 3, EOS, NO_TOKEN]), min_size=BATCH, max_size=BATCH))
    def commit(self, tokens: list[int]) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        last = [r for r, count in zip(plan.prefill, plan.counts, strict=True) if r.remaining == count]
        wanted = [*plan.decode, *last]
        sampled = self.s.commit(plan, np.array(tokens[: len(wanted)], np.int32))
        assert sampled == [r for r, token in zip(wanted, tokens, strict=False) if token != NO_TOKEN]

    @invariant()
    def whole(self) -> None:
        self.s.check()
        waiting = [int(r.request_id) for r in self.s.waiting]
        assert waiting == sorted(waiting)
        if waiting:
            assert max((int(r.request_id) for r in (*self.s.prefilling, *self.s.running)), default=-1) < waiting[0]
        assert len(set(waiting)) + len(self.s.prefilling) + len(self.s.running) == self.s.live
        for request, max_tokens in self.all.values():
            if request.finish_reason == "stop":
                assert request.output[-1] == EOS
            elif request.finish_reason == "length":
                assert request.generated == (max_tokens or CONTEXT - request.prompt_tokens)
            assert (request.error is not None) == (request.finish_reason == "error")
            assert EOS not in request.output[:-1]
            assert NO_TOKEN not in request.output
            assert (request.page_count > 0) == (request.state in (RequestState.PREFILLING, RequestState.RUNNING))
            assert request.cached_tokens < request.prompt_tokens
            assert not request.cached_tokens or self.s.pages.prefix.enabled

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        steps = 0
        while self.plan is not None or self.s.live:
            if self.plan is None:
                self.launch()
            self.commit([1] * BATCH)
            steps += 1
            assert steps < 2000
        assert self.s.pages.used == 0
        assert self.s.pages.cached == 0 or self.s.pages.prefix.enabled
        assert sorted(r.request_id for r in self.s.take_finished()) == sorted(self.all)


def slot(request: Request, position: int) -> tuple[int, int]:
    return int(request.page_row[position // PAGE_TOKENS]), position % PAGE_TOKENS


def history(request: Request, position: int) -> Any:
    """Who may read what: the salt, and all tokens up to this one."""
    return request.cache_salt, request.tokens[: position + 1].tobytes()


TestMachine = SchedulerMachine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
