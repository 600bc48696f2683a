"""test_layouts_agree.py: layouts of Python and of C are one rule: rows, pairs and fetched keys by `fdm plan --ranks`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")
from flash_dmattn.context_parallel import Layout, Mask  # noqa: E402

TOOL = os.environ.get("FDM_TOOL", str(Path(__file__).resolve().parents[2] / "build" / "fdm"))
LENGTH, DOCUMENTS = 1536, 5


def of_the_tool(layout: str, ranks: int, words: str) -> list:
    command = f"{TOOL} plan --device sm_80 --dtype bf16 --tflops 1 --algorithm gather --json --ranks {ranks} --layout {layout}"
    run = subprocess.run([*command.split(), *words.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [(each["rows"], each["pairs"], each["keys_fetched"]) for each in json.loads(run.stdout)["per_rank"]]


def of_python(layout: Layout, mask: Mask) -> list:
    pairs = layout.visible(mask)
    return [(layout.rows(rank), pairs[rank], layout.fetched(mask, rank)) for rank in range(layout.ranks)]


@pytest.mark.skipif(not Path(TOOL).exists(), reason="the tool is not built")
@pytest.mark.parametrize("ranks", (2, 3, 5))
@pytest.mark.parametrize("name", ("contiguous", "zigzag"))
@pytest.mark.parametrize("window", ((-1, -1), (700, 0)))
def test_masks_without_intervals(name, ranks, window):
    total = 7000
    words = f"--seqlen-q {total} --causal --window {window[0]},{window[1]}"
    expected = of_python(getattr(Layout, name)(total, ranks), Mask(is_causal=True, window_size=window))
    assert of_the_tool(name, ranks, words) == expected


@pytest.mark.skipif(not Path(TOOL).exists(), reason="the tool is not built")
@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("name", ("contiguous", "zigzag", "documents", "balanced"))
def test_documents(name, ranks):
    total = LENGTH * DOCUMENTS
    cu_seqlens = torch.arange(0, total + 1, LENGTH, dtype=torch.int32)
    start = (torch.arange(total) // LENGTH * LENGTH).int()
    mask = Mask(is_causal=True, key_intervals=(start[None], (start + LENGTH)[None]))
    if name == "documents":
        layout = Layout.documents(cu_seqlens, ranks)
    elif name == "balanced":
        layout = Layout.balanced([mask], ranks, total=total)
    else:
        layout = getattr(Layout, name)(total, ranks)
    words = f"--varlen --batch {DOCUMENTS} --seqlen-q {LENGTH} --causal"
    assert of_the_tool(name, ranks, words) == of_python(layout, mask)
