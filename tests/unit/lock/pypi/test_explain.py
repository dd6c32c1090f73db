"""What contradicts in a question without a solution, by a solver that knows a few pairs."""

from __future__ import annotations

from dataclasses import dataclass, field

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock.pypi.explain import explain_conflict, explain_on, find_conflict, find_fix
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from tests.made.values import make_lock, make_target

TORCH, VISION, EXTRA = "torch==2.6.*", "torchvision==0.15.2", "extra"


@dataclass
class Solver:
    """Refuses questions with all texts of one of `pairs`; `versions` is its answer otherwise."""

    pairs: tuple[frozenset[str], ...]
    versions: str = "torchvision==0.21.0 torch==2.6.0"
    asked: list[WheelRequest] = field(default_factory=list)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        self.asked.append(question)
        texts = {*question.requirements, *question.constraints}
        for pair in self.pairs:
            if pair <= texts:
                told = "Because torchvision==0.15.2 depends on torch==2.0.1 and you require torch==2.6.*, we "
                told += f"can conclude that your requirements are unsatisfiable, not {EXTRA}"
                raise UnsolvableError("no-solution", "t: No solution found", tree=told, hint="old")
        return PinnedVersions(lines=tuple(self.versions.split()))


def ask(*requirements: str, constraints: tuple[str, ...] = ()) -> WheelRequest:
    return WheelRequest(lock=make_lock(wheels=()), requirements=requirements, constraints=constraints)


def error_of(solver: Solver, question: WheelRequest) -> UnsolvableError:
    try:
        solver.solve(question)
    except UnsolvableError as error:
        return error
    raise AssertionError("it has a solution")


def test_the_contradiction_is_what_is_left_without_the_rest() -> None:
    solver = Solver((frozenset({TORCH, VISION}),))
    question = ask(TORCH, "numpy", EXTRA, VISION, constraints=("other<1",))
    told = explain_conflict(solver, question, error_of(solver, question), ("torch",))
    assert told.code == "requirements-conflict"
    assert told.conflict == (TORCH, VISION)
    assert "torchvision==0.15.2 depends on torch==2.0.1" in told.message
    assert EXTRA not in told.message
    assert "torchvision==0.21.0" in told.hint  # which the solver found
    assert VISION in told.hint
    assert told.tree


def test_constraints_count_and_a_change_that_has_no_solution_is_not_advised() -> None:
    both = frozenset({TORCH, "torchvision<0.16"})
    solver = Solver((both, frozenset({TORCH})))
    question = ask(TORCH, "torchvision", constraints=("torchvision<0.16",))
    told = explain_conflict(solver, question, error_of(solver, question), ("torch",))
    assert told.conflict == (TORCH,)
    assert told.hint == "old"
    solver = Solver((both,))
    told = explain_conflict(solver, question, error_of(solver, question), ("torch",))
    assert told.conflict == (TORCH, "torchvision<0.16")
    conflict = find_conflict(solver, question, error_of(solver, question).tree)
    assert conflict
    assert find_fix(solver, question, conflict, ("torch",)) == ("torchvision<0.16", "torchvision==0.21.0")


def test_what_the_solver_cannot_narrow_stays_as_it_was() -> None:
    class Away(Solver):
        def solve(self, question: WheelRequest) -> PinnedVersions:
            raise LockError("index-read-failed", "the index is away")

    error = UnsolvableError("no-solution", "t: No solution found", tree="torch torchvision")
    assert explain_conflict(Away(()), ask(TORCH, VISION), error) is error
    many = [f"torch{n}<1" for n in range(40)]
    assert find_conflict(Solver(()), ask(*many), " ".join(many)) is None


def test_an_older_release_below_takes_a_recipe_of_its_own() -> None:
    """The shape of a requirements.txt with numpy==1.24.4 on top of a target that holds a newer one."""
    under, target = (
        make_lock(target="pytorch-2.3-cu121"),
        make_target(framework="torch", version="2.3", cuda="12.1"),
    )
    error = explain_on(UnsolvableError("no-solution", "numpy", tree="all"), under, target)
    assert (error.code, error.message, error.tree) == ("no-solution", "numpy", "all")
    assert "imagefactory recipe import FILE --framework torch=2.3 --cuda 12.1" in error.hint
    assert "imagefactory lock pytorch-2.3-cu121 --upgrade-package PACKAGE" in error.hint
