"""The searches of `meshrunner bisect` find the change at fault, in few steps, past variants that cannot run."""

import subprocess
from pathlib import Path

import pytest

from meshrunner.runner.bisect.referee import Variant
from meshrunner.runner.bisect.searches import fewest_overrides, first_commit, first_of_list

VARIANTS = [Variant(str(i), [f"x={i}"]) for i in range(33)]


@pytest.mark.parametrize("culprit", range(1, 33))
def test_first_bad_variant_of_a_list_is_found_in_five_steps(culprit: int) -> None:
    tested: list[str] = []

    def is_bad(variant: Variant) -> bool:
        tested.append(variant.name)
        return int(variant.name) >= culprit

    assert first_of_list(VARIANTS, is_bad) == [str(culprit)]
    assert len(tested) == 5


def test_variants_that_cannot_run_are_skipped() -> None:
    broken = {"15", "16", "17"}

    def is_bad(variant: Variant) -> bool | None:
        return None if variant.name in broken else int(variant.name) >= 12

    assert first_of_list(VARIANTS, is_bad) == ["12"]
    assert first_of_list(VARIANTS, lambda each: None if each.name in broken else int(each.name) >= 17) == [
        *sorted(broken),
        "18",
    ]


GOOD = {key: f"{key}=0" for key in "abcdefgh"}
BAD = {key: f"{key}=1" for key in "bcdefghi"}  # without a, with i


@pytest.mark.parametrize("culprits", [{"c=1"}, {"i=1"}, {"~a"}, {"c=1", "h=1"}, {"b=1", "c=1", "i=1"}, {"~a", "g=1"}])
def test_fewest_overrides_that_explain_a_difference(culprits: set[str]) -> None:
    def is_bad(variant: Variant) -> bool:
        gone = {"~a"} if "a=0" not in variant.overrides else set()
        return culprits <= {*variant.overrides} | gone

    assert set(fewest_overrides(GOOD, BAD, is_bad)) == culprits


def test_overrides_that_cannot_run_alone_are_named_together() -> None:
    def is_bad(variant: Variant) -> bool | None:
        changed = {"d=1", "e=1"} & set(variant.overrides)
        return None if len(changed) == 1 else bool(changed)

    assert set(fewest_overrides(GOOD, BAD, is_bad)) == {"d=1", "e=1"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An empty worktree of a repository of 16 commits, and the commits."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*arguments: str) -> str:
        own = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(
            ["git", *own, *arguments], cwd=folder, text=True, stderr=subprocess.DEVNULL
        ).strip()

    git("init", "-b", "main")
    for number in range(16):
        (folder / "number").write_text(str(number))
        git("add", "number")
        git("commit", "-m", f"Set the number to {number}")
    control = folder.with_name("control")
    git("worktree", "add", "--detach", "--no-checkout", str(control), "main")
    return control, git("rev-list", "--reverse", "main").split()


@pytest.mark.parametrize("culprit", [1, 7, 15])
def test_first_bad_commit_is_found_with_git_bisect(repository: tuple[Path, list[str]], culprit: int) -> None:
    control, commits = repository
    assert first_commit(control, commits[0], "main", lambda each: commits.index(each) >= culprit) == [commits[culprit]]


def test_commits_that_cannot_run_are_named_together(repository: tuple[Path, list[str]]) -> None:
    control, commits = repository

    def is_bad(commit: str) -> bool | None:
        number = commits.index(commit)
        return None if number in (5, 6) else number > 6

    assert set(first_commit(control, commits[0], "main", is_bad)) == set(commits[5:8])
