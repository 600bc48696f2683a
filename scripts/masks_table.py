#!/usr/bin/env python3
"""masks_table.py: writes the measured tables of docs/lab/dynamic_masks.md and docs/lab/masks_on_device.md from results of
`bench/masks_cuda.py --json FILE` and `bench/train_dynamic_masks.py --out DIR`.

Replaces what stands between "<!-- NAME measured -->" and "<!-- end of NAME measured -->", where NAME is a part that the result
has: steps, windows, generation; of training "training", or "training in batches". Usage: masks_table.py FILE...
"""

from __future__ import annotations

import json
import pathlib
import sys
import textwrap

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("docs/lab/dynamic_masks.md", "docs/lab/masks_on_device.md")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def source(data: dict, file: pathlib.Path) -> str:
    text = f"{data['device']}, torch {data['torch']}, `{data['command']}`, commit {data['commit']} (`{file.name}`)."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def microseconds(part: dict) -> str:
    return f"{part['us']:.1f}" if part["us"] < 100 else f"{part['us']:.0f}"


def steps(rows: list[dict]) -> str:
    names = ["bias", "intervals", "bias_and_gradients", "attention", "step"]
    head = ["heads, D, S, W", "bias, us", "intervals", "bias and its gradients", "attention, forward and backward", "all in one graph", "more than attention"]
    return table(head, [[f"{r['heads']}, {r['head_dim']}, {r['keys']}, {r['window']}", *(microseconds(r[n]) for n in names),
                         f"{100 * r['share_of_building']:.1f} %"] for r in rows])


def windows(rows: list[dict]) -> str:
    head = ["S", "W", "intervals, us", "forward and backward, us", "causal over both"]
    return table(head, [[str(r["keys"]), "all (causal)" if r["window"] is None else f"{r['window']} (S / {r['keys'] // r['window']})",
                         microseconds(r["build"]) if "build" in r else "", microseconds(r["attention"]),
                         f"{r['times_causal']:.2f}x" if "times_causal" in r else "1"] for r in rows])


def generation(rows: list[dict]) -> str:
    whole, *others = rows
    head = ["W", "intervals that are there, us", "append", "attention to the slots", "both in one graph", "all keys over it", "with their bias"]
    text = ""
    for lead, of in ((f"All {whole['keys']} keys, {whole['heads']} query heads on {whole['heads_kv']}; a graph of one call", lambda part: part),
                     ("Eight calls in a row in one graph", lambda part: part["in_a_row"])):
        dense, biased = of(whole["dense"]), of(whole["dense_with_bias"])
        text += f"{lead}: {microseconds(dense)} us, {microseconds(biased)} with a bias.\n\n"
        text += table(head, [[str(r["window"]), *(microseconds(of(r[n])) for n in ("intervals", "append", "attend", "slots_step")),
                              f"{dense['us'] / of(r['slots_step'])['us']:.1f}x",
                              f"{biased['us'] / of(r['slots_step'])['us']:.1f}x"] for r in others]) + "\n"
    return text


def training(results: list[dict]) -> str:
    head = ["S, W", "way", "steps", "tokens/s", "memory", "training, bits a byte", "validation"]
    rows = []
    for result in results:
        for way in result["ways"]:
            first = [f"{result['seq']}, {result['window']}", way["name"], str(len(way["seconds"]))]
            if way["failed"]:
                rows.append([*first, way["failed"], "", "", ""])
                continue
            memory = f"{way['peak_bytes'] / 2**30:.1f} GiB" if way["peak_bytes"] else "not measured"
            rows.append([*first, f"{way['tokens_per_second']:,.0f}", memory, f"{way['training_bits_at_the_end']:.3f}",
                         f"{way['validation_bits_per_byte']:.3f}"])
    return table(head, rows)


MAKERS = {"steps": steps, "windows": windows, "generation": generation, "training": training, "training in batches": training}


def parts_of(data: dict) -> dict:
    if "results" in data:
        return {"training" if data["model"]["batch"] == 1 else "training in batches": data["results"]}
    return {name: data[name] for name in MAKERS if name in data}


def main(arguments: list[str]) -> int:
    for name in arguments:
        file = pathlib.Path(name)
        data = json.loads(file.read_text())
        for part, found in parts_of(data).items():
            replaced = 0
            for page in (ROOT / each for each in PAGES):
                table = MAKERS[part](found).rstrip("\n") + "\n\n" + source(data, file)
                text, places = marked_table.replaced(page.read_text(), f"{part} measured", table)
                page.write_text(text)
                replaced += places
            if not replaced:
                print(f"masks_table: no page has a place for {part}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
