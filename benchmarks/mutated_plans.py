"""What becomes of changed plans: ``python benchmarks/mutated_plans.py [--first 0] [--count 2000] [--models flat ...]``.

Each plan has something changed at random (`tests.mutated_plans`): the factor of an op, a layout, a mesh, storage, ZeRO
level, recomputation, stages, schedule, microbatches, huge and negative numbers.  With ``--nearby``, a decision is
another one that could stand there (`tests.nearby_plans`), so that half of the plans train.  It must be refused with a
PlanFormatError or a PlanMismatchError, or train to one device's loss, gradients and parameters, on simulated ranks in
float64.  A plan that trains must also be priced, printed and read back.  The exit status is 1 if any plan does anything
else.

A plan follows from its number alone, which also says of which model it is: they take turns.  So ``--first 400`` goes on
where a run of 400 plans ended.  A line every ten seconds says how far the run is.  When ``--seconds`` are
over, or at Ctrl-C or SIGTERM, the tables of the plans tried until then are printed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import platform
import random
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import PlanFormatError, PlanMismatchError
from autopar.lower import ParallelModule
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.arguments import training_spec
from autopar.program import Program
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.step.plan_check import check_fit
from autopar.step.pricing import predict
from autopar.trace.calls.structure import describe
from autopar.verify import VerificationReport, compare
from autopar.verify.rehearsal import Run, join_runs, run_ranks, run_single, train
from tests.mutated_plans import mutated
from tests.nearby_plans import nearby
from tests.random_plans import pipelines_of, random_pipeline, random_plan
from tests.zoo import Subject, plan_for, quick_prices, subject

# In float64, but for the product of experts that has none.
_DTYPES = {"grouped_mixtral": torch.float32}
_MODELS = ("flat", "deep_llama", "mixtral", "grouped_mixtral", "t5", "unet", "deep_batch_normed")
_WORLD = 4
_STEPS = 2  # the second one tells whether the first one updated everything
_LIMIT_S = 120  # a step of these models takes a tenth of a second
_SAY_EVERY_S = 10.0
_OUTCOMES = ("equal", "PlanFormatError", "PlanMismatchError")
_SEARCHED_MODELS = ("flat", "deep_llama", "t5")  # can be cut into microbatches
_SEARCHED = ((), ("zero=3", "recompute=full"), ("data=2", "tensor=2"), ("microbatches=2", "zero=2"))


def base_plan(name: str, program: Program, rng: random.Random) -> Plan:
    """A legal plan: searched for, random, or random with stages."""
    kind = rng.random()
    splits = microbatches(name)
    schedules = pipelines_of(program, 2, splits[-1])
    if kind < 0.2 and name in _SEARCHED_MODELS:
        return plan_for(name, _WORLD, rng.choice(_SEARCHED))
    if kind < 0.55 and schedules:
        return random_pipeline(program, _WORLD, rng.randrange(50), 2, rng.choice(schedules), splits[-1])
    return random_plan(program, _WORLD, rng.randrange(50), rng.choice(splits))


@cache
def microbatches(name: str) -> list[int]:
    """The numbers of microbatches that a model can be trained in, of some."""
    program = subject(name, _DTYPES.get(name, torch.float64)).traced.program
    joins = (False, True)  # without stages and with them
    return [
        count
        for count in (1, 2, 4)
        if all(isinstance(time_assignment(program, count, joins_outputs=j), TimeAssignment) for j in joins)
    ]


def outcome(who: Subject, text: str) -> tuple[str, str]:
    """What becomes of a plan's file, in a word, and more about it."""
    program = who.traced.program
    try:
        plan = Plan.from_json(text)
        check_fit(plan, program, _WORLD)
    except (PlanFormatError, PlanMismatchError) as error:
        return type(error).__name__, str(error)
    trained = together(who, plan)
    if plan.decisions.gradients:
        rounded, plan = trained, plan.with_decisions(gradients="")
        trained = together(who, plan)
        if not is_rounded(rounded, trained, next(who.model.parameters()).dtype):
            return "wrong numbers", f"rounded gradients: losses {rounded.losses} for {trained.losses}"
    report = compare(alone(who), trained, _WORLD)
    if not is_equal(report, next(who.model.parameters()).dtype):
        return "wrong numbers", str(report)
    training = training_spec(who.model, "adamw")
    prediction = predict(program, plan.decisions, quick_prices(_WORLD), training, schedule_actions)
    if not (0 < prediction.step_time_s < math.inf and 0 < prediction.peak_memory_bytes < math.inf):
        return "no price", str(prediction)
    again = Plan.from_json(plan.to_json())
    return ("equal", "") if str(again) == str(plan) else ("read otherwise", str(again))


@cache
def alone(who: Subject) -> Run:
    """What one device makes of a model."""
    in_double = next(who.model.parameters()).dtype == torch.float64
    run = run_single(who.model, who.inputs, _STEPS, in_double=in_double, batches=[who.inputs])
    return replace(run, outputs={name: x for name, x in run.outputs.items() if "in training mode" in name})


def together(who: Subject, plan: Plan) -> Run:
    """What all ranks make of a model by `plan`; outputs are read after training, with other values in buffers."""

    def action(model: ParallelModule) -> Run:
        run = train(model, who.inputs, _STEPS)
        for buffer in model.buffers():
            if buffer.is_floating_point():  # as in `autopar.verify.eval_outputs`
                buffer.mul_(1.25).add_(0.0 if buffer.any() else 1 / 64)
        returned = enumerate(describe(model(**who.inputs))[1])
        named = {f"output {n} in training mode with other buffers": x for n, x in returned if x.is_floating_point()}
        return replace(run, outputs={name: x.detach().clone() for name, x in named.items()})

    return join_runs(run_ranks(who.model, who.traced, plan, action), plan.num_groups)


def is_equal(report: VerificationReport, dtype: torch.dtype) -> bool:
    """Whether training gave one device's numbers, as the parity tests mean it (`tests.zoo.assert_parity`)."""
    if report.worst_output[1] > (1e-2 if dtype == torch.float32 else 1e-6):  # parameters were trained
        return False
    if dtype == torch.float32:
        return report.loss_error <= 1e-6 and report.worst_gradient[1] <= 1e-4
    return report.loss_error <= 1e-12 and report.worst_gradient[1] <= 1e-9 and report.parameter_error <= 1e-7


def is_rounded(rounded: Run, exact: Run, dtype: torch.dtype) -> bool:
    """Whether gradients that are added up in another dtype are those of `exact`, to bfloat16's rounding.

    What cancels (the bias in front of a batch norm) leaves only rounding: errors are relative to the largest gradient.
    """
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    first = math.isclose(rounded.losses[0], exact.losses[0], rel_tol=tolerance)
    largest = max(float(x.abs().max()) for x in exact.gradients.values())
    errors = (float((rounded.gradients[name] - x).abs().max()) for name, x in exact.gradients.items())
    return first and rounded.gradients.keys() == exact.gradients.keys() and max(errors) <= 0.02 * largest


@contextmanager
def limited(seconds: int) -> Generator[None]:
    """Inside, what takes longer ends in a TimeoutError."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_plan(name: str, seed: int, is_nearby: bool) -> tuple[str, str, str]:
    """The decision that is changed, what becomes of the plan, and more about it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the run
    torch.set_num_threads(1)
    who = subject(name, _DTYPES.get(name, torch.float64))
    program = who.traced.program
    change = nearby if is_nearby else mutated
    changed, text = change(base_plan(name, program, random.Random(seed)), program, seed)
    try:
        with limited(_LIMIT_S):
            found, detail = outcome(who, text)
    except TimeoutError as error:
        return changed, "hang", str(error)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is what this looks for)
        return changed, f"{type(error).__name__}", "".join(traceback.format_exception(error)[-4:])
    return changed, found, detail


@dataclass
class Tally:
    """How many plans ended how, by model and by the decision that was changed."""

    by_model: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_decision: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, name: str, changed: str, found: str) -> None:
        """Count a plan."""
        self.by_model[name][found] += 1
        for each in changed.split("+"):
            self.by_decision[each][found] += 1

    @property
    def total(self) -> Counter[str]:
        """How many plans ended how."""
        return sum(self.by_model.values(), Counter[str]())

    @property
    def failures(self) -> int:
        """How many plans neither trained as one device nor were refused."""
        return sum(count for found, count in self.total.items() if found not in _OUTCOMES)

    def print_tables(self) -> None:
        """A table by model, and one by decision."""
        total = self.total
        columns = [*_OUTCOMES, *(found for found in total if found not in _OUTCOMES)]
        for head, rows in (("model", self.by_model), ("decision", self.by_decision)):
            print(f"{head:20s}" + "".join(f"{column:>20s}" for column in columns))
            for row, counts in (*rows.items(), ("all", total)):
                print(f"{row:20s}" + "".join(f"{counts[column]:20d}" for column in columns))


def try_plans(options: argparse.Namespace, tally: Tally) -> None:
    """Try the plans that were asked for, as long as there is time; print what fails, and how far this is."""
    started_s = said_s = time.perf_counter()
    seeds = range(options.first, options.first + options.count)
    names = [options.models[seed % len(options.models)] for seed in seeds]
    pool = ProcessPoolExecutor(options.processes, mp.get_context("spawn"))
    try:
        for name, seed, each in zip(
            names, seeds, pool.map(try_plan, names, seeds, [options.nearby] * len(seeds)), strict=True
        ):
            changed, found, detail = each
            tally.add(name, changed, found)
            if found not in _OUTCOMES or (options.say and detail):
                print(f"{name}, plan {seed}, {changed}: {found}\n{detail}", flush=True)
            now_s = time.perf_counter()
            if now_s - said_s >= _SAY_EVERY_S:
                said_s = now_s
                counts = ", ".join(f"{count} {what}" for what, count in tally.total.most_common())
                print(
                    f"# {seed + 1 - options.first} of {options.count} in {now_s - started_s:.0f} s: {counts}",
                    flush=True,
                )
            if now_s - started_s > options.seconds:
                break
    finally:
        for process in [*(pool._processes or {}).values()]:  # a plan that runs now would be waited for
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    """Try the plans; print tables, also of a run that is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first plan")
    parser.add_argument("--count", type=int, default=2000, help="plans, over all models")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no plan is begun later")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), help="models of tests.models")
    parser.add_argument("--nearby", action="store_true", help="other decisions that could stand there")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--say", action="store_true", help="print every refusal")
    options = parser.parse_args()
    print(f"# {' '.join(sys.argv)}: autopar {version('autopar')}, torch {version('torch')}, "
          f"Python {platform.python_version()}, {platform.machine()}", flush=True)  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.perf_counter()
    tally = Tally()
    with suppress(KeyboardInterrupt):
        try_plans(options, tally)
    tally.print_tables()
    print(f"{tally.total.total()} of {options.count} plans from number {options.first} "
          f"in {time.perf_counter() - started_s:.0f} s: {tally.failures} failed")  # fmt: skip
    return int(tally.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
