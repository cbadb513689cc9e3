"""What `show` says of a run, against figures computed by hand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from meshrunner.runner import cli
from meshrunner.runner.verbs.planning.show import WHOLE_GRADIENTS


def shown(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert cli._dispatch(["show", *overrides]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def rows(text: str) -> dict[str, str]:
    """Row -> the rest of its line."""
    names = ("parameters", "mesh", "weights", WHOLE_GRADIENTS, "gradients", "optimizer state")
    found: dict[str, str] = {}
    for line in text.splitlines():
        for name in (*names, "together"):
            if line.startswith(f"{name} ") and name not in found:
                found[name] = " ".join(line.removeprefix(name).split())
                break
    return found


def test_bytes_of_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    """
    6 blocks of 4 x 256 x 256 + 3 x 256 x 768 + 2 x 256 parameters, two tables of 4096 x 256, a norm: 7,212,288. Half of
    each of the 57 is on a device, in fp32, with a gradient and two moments; each has a count of 4 bytes.
    """
    found = rows(shown(capsys, "launch.workers=2", "hardware=cpu"))
    assert found["parameters"] == "7,212,288"
    assert found["weights"] == found["gradients"] == "13.76 MiB 14,424,576 bytes"
    assert found["optimizer state"] == f"27.51 MiB {2 * 14_424_576 + 4 * 57:,} bytes"
    assert found["together"].startswith("55.03 MiB")
    assert "(this machine's memory / 2 workers)" in found["together"]


def test_bytes_of_an_8b_model_on_8_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """8,030,261,248 parameters in 291 tensors whose first dimensions 8 divides; a node of the hardware has 8 devices."""
    found = rows(shown(capsys, "model=llama3_8b", "hardware=h100_80gb", "precision=bf16"))
    assert found["parameters"] == "8,030,261,248"
    assert found["mesh"] == "shard(8)"
    assert found["weights"] == found["gradients"] == f"3.74 GiB {8_030_261_248 * 4 // 8:,} bytes"
    assert found["optimizer state"] == f"7.48 GiB {8_030_261_248 * 8 // 8 + 4 * 291:,} bytes"
    assert found["together"] == "14.96 GiB 18.9% of 79.11 GiB (H100 80GB)"


def test_replicas_hold_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "parallelism=ddp", "launch.workers=4", "hardware=cpu")
    found = rows(text)
    assert found["weights"] == found["gradients"] == f"27.51 MiB {7_212_288 * 4:,} bytes"
    assert found["optimizer state"].endswith(f"{7_212_288 * 8 + 4 * 57:,} bytes")
    assert "parallelism=ddp has no units" in text


def test_what_is_frozen_has_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(shown(capsys, "model.freeze=[tok_embeddings.*]", "launch.workers=2", "hardware=cpu"))
    trained = 7_212_288 - 4096 * 256
    assert found["weights"].endswith("14,424,576 bytes")
    assert found["gradients"].endswith(f"{trained * 2:,} bytes")
    assert found["optimizer state"].endswith(f"{trained * 4 + 4 * 56:,} bytes")


def test_whole_gradients_between_micro_batches_are_held_only_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("launch.workers=2", "hardware=cpu")
    whole = 7_212_288 * 4
    found = rows(shown(capsys, "global_batch=16", *common))
    assert found[WHOLE_GRADIENTS] == f"0.00 MiB 0 bytes; {whole:,} with accumulate=hold"
    assert found["together"].startswith("55.03 MiB")
    found = rows(shown(capsys, "global_batch=16", "parallelism.accumulate=hold", *common))
    assert found[WHOLE_GRADIENTS] == f"27.51 MiB {whole:,} bytes; 0 with accumulate=reduce"
    assert found["together"].startswith("82.54 MiB")
    assert WHOLE_GRADIENTS not in rows(shown(capsys, *common))
    assert WHOLE_GRADIENTS not in rows(shown(capsys, "parallelism=ddp", "global_batch=16", *common))


def test_what_is_offloaded_is_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "parallelism.cpu_offload=true", "launch.workers=2", "hardware=cpu")
    assert "in host memory" in rows(text)["together"]


def test_the_result_comes_first_and_the_configuration_only_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "launch.workers=2", "hardware=cpu")
    assert text.startswith("parameters")
    assert "weight_decay" not in text and len(text.splitlines()) < 25
    more = shown(capsys, "launch.workers=2", "hardware=cpu", "--config")
    assert more.startswith(text.rstrip()) and "\n  weight_decay: 0.1\n" in more


@pytest.mark.slow
def test_everything_is_legible_in_a_small_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(capsys, "model=llama3_405b", "hardware=h100_80gb", "launch.nodes=16", "activation_checkpoint=full")
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for part in (
        "layers.0 ...",
        "layers.125: 126",
        "3,187,703,808",
        "kept",
        "freed",
        "recompute: full, 126 of 126 blocks;",
    ):
        assert part in words, text


def test_neither_the_compiler_nor_dtensor_is_imported() -> None:
    code = (
        "import sys; from meshrunner.runner import cli; cli._dispatch(['show', 'hardware=cpu']); "
        "sys.exit(' '.join({'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_laptop_shows_what_a_node_of_the_named_hardware_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU is needed: 8 devices are the hardware's."""
    found = rows(shown(capsys, "hardware=h100_80gb", "launch.nodes=2", "parallelism=hsdp2"))
    assert found["mesh"] == "replicate(2) x shard(8)"


def test_the_stages_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """
    A block has 852,480 parameters, each table 1,048,576, the norm 256. Under zbv the first rank has the first and the last
    stage, with 2 + 1 blocks, and so holds most.
    """
    text = shown(
        capsys,
        *("launch.workers=2", "hardware=cpu", "parallelism.pipeline=2", "parallelism.pipeline_split=[2,1,2,1]"),
        *(
            "parallelism.pipeline_schedule=zbv",
            "parallelism.reshard_after_forward=never",
            "micro_batch=2",
            "global_batch=8",
        ),
    )
    assert rows(text)["mesh"] == "pipeline(2) x shard(1)"
    table = [line.split() for line in text.splitlines() if re.match(r" +\d", line)]
    assert [line[:2] for line in table] == [["0", "0"], ["1", "1"], ["2", "1"], ["3", "0"]]
    parameters = [int(line[-2].replace(",", "")) for line in table]
    assert parameters == [2 * 852_480 + 1_048_576, 852_480, 2 * 852_480, 852_480 + 1_048_576 + 256]
    assert sum(float(line[-1].rstrip("%")) for line in table) == pytest.approx(100, abs=0.2)
    assert "each device of pipeline rank 0 (the rank with the most parameters) holds" in text
    assert rows(text)["weights"].endswith(f" {4 * (parameters[0] + parameters[3]):,} bytes")
    assert "gathers" not in text
