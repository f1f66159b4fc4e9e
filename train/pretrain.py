"""pretrain: a whole run, from an empty directory or from where it was stopped, to its result."""

from __future__ import annotations

import math
import signal
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from crucible.checkpoint import expected_tensors, parameter_count
from crucible.tokenizer import Tokenizer
from crucible_train.distributed import Workers, workers
from crucible_train.errors import TrainingError
from crucible_train.evaluation import Evaluation, Score
from crucible_train.loader import BatchLoader
from crucible_train.readback import Readback, StepValues
from crucible_train.run_config import RunConfig
from crucible_train.run_directory import TENSORBOARD
from crucible_train.run_log import RunLog
from crucible_train.run_meter import Row, RunMeter
from crucible_train.run_progress import RunProgress
from crucible_train.run_result import RunResult, medians, read_result, write_result
from crucible_train.run_start import RunStart, start_run
from crucible_train.sampling import continue_tokens
from crucible_train.stop_signal import StopSignal
from crucible_train.tensorboard_log import TensorboardLog
from crucible_train.tensors import to_checkpoint_tensors
from crucible_train.trainer_state import random_state

SAMPLE_TOKENS = 128


def pretrain(config: RunConfig, *, resume: bool = False, quiet: bool = False) -> RunResult:
    """Trains as ``config`` says and returns what came of it, the same on every process of torchrun.

    resume: go on from the last checkpoint in ``config.out``, or from the start if none was reached. SIGINT and SIGTERM
    save and end the run (``stopped_by``). Raises TrainingError, and other CrucibleErrors, for what cannot be done and
    when the loss is no number any more.
    """
    config.check()
    with workers(config.device) as group, StopSignal() as stop, ExitStack() as held:
        start = start_run(config, group, held, resume=resume)
        progress = RunProgress(start=start.state.step, steps=config.steps, shown=group.is_main and not quiet)
        for note in start.notes:
            progress.say(note)
        finished = read_result(start.directory.path) if start.state.step == config.steps else None
        if group.broadcast(finished is not None):
            progress.say(f"{config.out}: all {config.steps} steps are done")
            return group.broadcast(finished)  # type: ignore[no-any-return]
        loop = _Loop(config, group, start, stop, progress)
        try:
            return loop.run()
        finally:
            loop.close()


class _Loop:
    """The steps of one run. Every process runs it; only rank 0 writes and speaks."""

    def __init__(
        self, config: RunConfig, group: Workers, start: RunStart, stop: StopSignal, progress: RunProgress
    ) -> None:
        self._config, self._group, self._start, self._stop, self._progress = config, group, start, stop, progress
        self._trainer, self._state = start.trainer, start.state
        self._evaluation = Evaluation(
            start.val_data, context=start.context, batch=config.batch, max_tokens=config.eval_tokens, workers=group
        )
        if not self._evaluation.windows:
            progress.say(f"{config.data}: no validation tokens, so no validation loss")
        self._meter = RunMeter(
            start.model_config,
            self._trainer.schedule,
            context=start.context,
            global_batch=start.resolved["global_batch"],
            device=group.device,
            world=group.world,
        )
        self._loader = BatchLoader(
            start.train_data,
            config.batch,
            start.context,
            config.order_seed,
            rank=group.rank,
            world=group.world,
            start_step=self._state.step,
            grad_accum=config.grad_accum,
            device=group.device,
        )
        self._readback = Readback(group.device)
        self._log = RunLog(start.directory.log, self._state.step) if group.is_main else None
        wanted = config.tensorboard and group.is_main
        self._board = TensorboardLog(start.directory.path / TENSORBOARD, self._state.step) if wanted else None
        self._stopping = False
        self._began = time.monotonic() - self._state.seconds
        self._loop_began = time.monotonic()

    def run(self) -> RunResult:
        first, last = self._state.step + 1, self._config.steps
        for step in range(first, last + 1):
            batches = [self._loader.next() for _ in range(self._config.grad_accum)]
            self._readback.push(step, self._trainer.update(step, batches, self._stop.received is not None))
            if step < last and not self._due(step):
                for values in self._readback.ready():
                    self._check(values)
                    self._write(values)
            if self._stopping or step == last or self._due(step):
                self._pause(step)
            if self._stopping:
                return self._stopped()
        return self._finish()

    def _due(self, step: int) -> bool:
        config = self._config
        return any(every and step % every == 0 for every in (config.eval_every, config.save_every, config.sample_every))

    def _pause(self, step: int) -> None:
        """Between two steps: waits for the device, evaluates, samples and saves where it is time to."""
        config, last = self._config, step == self._config.steps
        evaluating = last or (config.eval_every and step % config.eval_every == 0)
        score = None
        for values in self._readback.ready(all=True):
            self._check(values)
            if values.step == step and evaluating and self._evaluation.windows:
                score = self._evaluate(step)
            self._write(values, score)
        if config.sample_every and step % config.sample_every == 0:
            self._sample(step)
        best = score is not None and self._state.best_step == step
        if last or best or self._stopping or (config.save_every and step % config.save_every == 0):
            self._save(step)
        self._readback.restart()

    def _check(self, values: StepValues) -> None:
        """Looks at what every process knows alike: the wish to stop, and whether there is still a loss."""
        self._stopping |= values.stop
        if math.isfinite(values.loss) and math.isfinite(values.grad_norm):
            return
        if self._group.is_main:
            write_result(self._start.directory.path, self._result(values.step, diverged=True))
        raise TrainingError(
            f"{self._config.out}: diverged at step {values.step} (loss {values.loss}, gradient {values.grad_norm}); "
            f"lower --lr ({self._config.peak_lr:g}) or lengthen --warmup-steps; the last checkpoint is from before"
        )

    def _write(self, values: StepValues, score: Score | None = None) -> None:
        """The step's line in the log and on the screen."""
        row: Row = self._meter.row(values)
        if score is not None:
            row |= {"val_loss": score.loss, "val_bits_per_byte": score.bits_per_byte}
        if self._log is not None:
            self._log.append(row)
        if self._board is not None:
            self._board.add(row)
        shift = self._meter.shift(values)
        if shift is not None:
            self._progress.warn(shift)
        speed = row["tokens_per_second"]
        self._progress.update(
            values.step, loss=values.loss, lr=row["lr"], tokens_per_second=speed, mfu=row["mfu"],
            validation_loss=self._state.last_val_loss,
        )  # fmt: skip

    def _evaluate(self, step: int) -> Score:
        score = self._evaluation.run(self._trainer.loss)
        state = self._state
        state.last_val_loss, state.last_bits_per_byte = score.loss, score.bits_per_byte
        if math.isfinite(score.loss) and (state.best_val_loss is None or score.loss < state.best_val_loss):
            state.best_val_loss, state.best_step = score.loss, step
        bits = "" if score.bits_per_byte is None else f", {score.bits_per_byte:.4f} bits per byte"
        self._progress.say(f"step {step}: validation loss {score.loss:.4f}{bits}")
        return score

    def _sample(self, step: int) -> None:
        """Adds a text from the model to samples.txt: the start of a document."""
        if not self._group.is_main:
            return
        data, shape = self._start.train_data, self._start.model_config
        tokenizer = Tokenizer.for_checkpoint(data.directory)
        ids = continue_tokens(
            self._trainer.logits,
            shape,
            [data.separator_id],
            max_tokens=SAMPLE_TOKENS,
            seed=step,
            device=self._group.device,
        )
        text = tokenizer.decode(ids)
        self._start.directory.add_sample(step, text)
        self._progress.say(f"step {step}: {text[:200]!r}")

    def _save(self, step: int) -> None:
        """Writes the checkpoint of ``step``; the log it belongs to reaches the disk first."""
        state, directory = self._state, self._start.directory
        optimizer = self._trainer.optimizer.state()  # collective when sharded
        state.step, state.seconds = step, time.monotonic() - self._began

        def write() -> None:
            if self._log is not None:
                self._log.sync()
            state.samples_bytes = directory.samples_bytes
            state.random = random_state(self._group.device)
            state.optimizer = optimizer or {}
            tensors = to_checkpoint_tensors(self._trainer.model)
            directory.checkpoints.save(state, self._start.model_config, tensors, self._start.files)
            state.optimizer = {}

        self._group.agree(write)

    def _stopped(self) -> RunResult:
        """After a signal: the checkpoint is written."""
        number = max(self._group.gather(self._stop.received or 0))
        step, name = self._state.step, signal.Signals(number).name
        self._progress.say(f"stopped by {name} after step {step}, which is saved; go on with --resume")
        return msgspec.structs.replace(self._result(step), stopped_by=number)

    def _finish(self) -> RunResult:
        result = self._result(self._state.step)
        if self._group.is_main:
            write_result(self._start.directory.path, result)
        return self._group.broadcast(result)  # type: ignore[no-any-return]

    def _result(self, step: int, diverged: bool = False) -> RunResult:
        """What the run has come to; the figures of the log are rank 0's alone."""
        state, passed = self._state, time.monotonic() - self._loop_began
        figures = medians(self._start.directory.log) if self._group.is_main else {}
        losses: dict[str, Any] = {} if diverged else {
            "best_val_loss": state.best_val_loss,
            "best_step": state.best_step,
            "final_val_loss": state.last_val_loss,
            "val_bits_per_byte": state.last_bits_per_byte,
        }  # fmt: skip
        return RunResult(
            steps=step,
            tokens=step * self._start.resolved["global_batch"] * self._start.context,
            parameters=parameter_count(expected_tensors(self._start.model_config)),
            config_hash=state.config_hash,
            seconds=round(time.monotonic() - self._began, 3),
            loader_wait_share=round(self._loader.wait_seconds / passed, 6),
            diverged=diverged,
            **losses,
            **figures,
        )

    def close(self) -> None:
        self._loader.close()
        self._meter.close()
        self._progress.close()
        if self._log is not None:
            self._log.close()
        if self._board is not None:
            self._board.close()
