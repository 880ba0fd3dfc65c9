"""What the repository promises as a whole: anyone can read its files, and its README is true."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
# Folders that only one person's machine has.
PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|opt|Users)/[\w.]")
# Numbers in a tracker that a reader cannot open, but not the terms that only look like them.
TRACKER_NUMBER = re.compile(r"\b(?!UTF-|GPT-|SHA-|PEP-)[A-Z]{2,4}-\d{1,2}\b|\bissue #?\d+")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def tracked_files() -> list[Path]:
    """The text files git tracks, or would once they are added."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    binary = {".png", ".svg", ".safetensors", ".pt"}
    return [path for path in paths if path.is_file() and path.suffix not in binary]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern occurs in the tracked files; this file, which spells it out, excepted."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert not lines_with(PRIVATE_PATH)


def test_no_file_refers_to_a_tracker_its_reader_cannot_open() -> None:
    assert not lines_with(TRACKER_NUMBER)


def test_links_between_documents_lead_somewhere_inside_the_repository() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in LINK.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).resolve().is_relative_to(ROOT)
        or not (path.parent / target).exists()
    ]
    assert not broken


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_in_the_documents_is_a_target(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:^|`|&& )(?:\w+=\S+ )*make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named
    assert named <= targets


def test_every_option_of_the_demo_in_the_documents_exists() -> None:
    usage = subprocess.run(
        [sys.executable, "-m", "infinity.demo", "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"(?:infinity\.demo|ARGS=)([^`\n]*)", text)
    named = {option for command in commands for option in re.findall(r"--[a-z-]+", command)}
    assert named <= set(re.findall(r"--[a-z-]+", usage))


def test_importing_the_packages_prints_and_warns_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import tiering, infinity"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout + ran.stderr == ""


def blocks(language: str, document: str = "README.md") -> list[str]:
    """A document's code in a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def test_the_training_example_of_the_readme_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = blocks("json")[0].replace("/mnt/nvme", str(tmp_path)).replace("8GiB", "8MiB")
    Path("ds_config.json").write_text(config)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1), Mean())
    before = model[0].weight.detach().float().clone()
    example = blocks("python")[0]
    names = {"model": model, "batches": [torch.ones(4, 8, dtype=torch.bfloat16)]}
    exec(example, names)
    assert not torch.equal(before, names["weights"]["0.weight"].float())  # type: ignore[index]


def test_the_swapping_example_of_the_readme_gives_the_tensor_back(tmp_path: Path) -> None:
    example = blocks("python")[1].replace("/mnt/nvme", str(tmp_path))
    names: dict[str, object] = {"tensor": torch.arange(5)}
    exec(example, names)
    assert torch.equal(names["restored"], torch.arange(5))  # type: ignore[arg-type]


def test_the_example_of_the_swappers_page_gives_the_tensor_back_twice(tmp_path: Path) -> None:
    example = blocks("python", "docs/swapper.md")[0].replace("/mnt/nvme", str(tmp_path))
    names: dict[str, torch.Tensor] = {}
    exec(example, names)
    assert torch.equal(names["restored"], names["expected"])
    assert torch.equal(names["out"], names["expected"])


class Mean(torch.nn.Module):
    """A loss of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar, whatever the shape of ``x``."""
        return x.mean()


@pytest.fixture
def bare_machine(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has Python and apt-get, but no compiler, no sudo, no root."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "cat"):
        (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name}"))
    (tools / "python3").symlink_to(sys.executable)
    for name, prints in (("id", "1000"), ("apt-get", "apt-get ran")):
        (tools / name).write_text(f"#!/bin/sh\necho {prints}\n")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name in {"HOME", "LANG"}}
    return {**kept, "PATH": str(tools)}


def set_up(environment: dict[str, str], folder: Path) -> str:
    """Run the set-up, which must fail, and return what it said."""
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts/setup.sh"), str(folder / "venv")],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stderr
    return ran.stderr


def test_setup_without_root_and_sudo_says_what_an_administrator_must_run(
    bare_machine: dict[str, str], tmp_path: Path
) -> None:
    said = set_up(bare_machine, tmp_path)
    assert "there is no sudo" in said
    assert "apt-get install" in said
    assert "gcc" in said
    assert "apt-get ran" not in said


def test_setup_asks_for_sudo_aloud(bare_machine: dict[str, str], tmp_path: Path) -> None:
    sudo = Path(bare_machine["PATH"]) / "sudo"
    sudo.write_text("#!/bin/sh\nexit 1\n")
    sudo.chmod(0o755)
    said = set_up(bare_machine, tmp_path)
    assert "asking for sudo to run: apt-get install" in said
    assert "failed" in said


def test_setup_without_apt_says_what_is_missing(
    bare_machine: dict[str, str], tmp_path: Path
) -> None:
    (Path(bare_machine["PATH"]) / "apt-get").unlink()
    said = set_up(bare_machine, tmp_path)
    assert "not a Debian or Ubuntu system" in said
    assert "gcc" in said


def test_setup_says_which_python_is_needed(bare_machine: dict[str, str], tmp_path: Path) -> None:
    said = set_up({**bare_machine, "PYTHON": "python2.7"}, tmp_path)
    assert "python2.7" in said
    assert "3.10 or later" in said
