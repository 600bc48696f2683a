"""Fits the host's time and the time of gradients' parts of fdm_links to measured passes over several ranks.

    python bench/fit_ranks.py bench/results/nvidia-h200/2026-11-28-ranks.json ...-ranks-graphs.json

Files are those of bench_context_parallel.py, by gather. Of each pass the seconds are

    host_start + max(device + parts / sums_bandwidth, exchanges * host_exchange)

device: what fdm plan --ranks says without these three, which is recorded as "device" (as "ranks" by tools that did not
know them). parts: bytes of float32 dk and dv of the needed keys; a forward has none. exchanges: one of a set of heads,
two in a backward. The constants are those of a grid with the least mean error; residuals are printed pass by pass."""

import argparse
import itertools
import json
import pathlib
import re
import statistics
from typing import Any, Dict, List, Sequence, Tuple

START_US = range(200, 1000, 50)
EXCHANGE_US = range(100, 1000, 50)
SECONDS_A_GB = [each / 1000 for each in range(1, 11)]
FLOAT32_BYTES = 4


def passes_of(path: str) -> List[Dict[str, Any]]:
    recorded = json.loads(pathlib.Path(path).read_text())
    found = []
    for record in recorded["records"]:
        case = re.fullmatch(r"\w+ S(\d+) H\d+/(\d+) D(\d+)", record["case"])
        if not case:
            raise SystemExit(f"{path}: a case is '{record['case']}'; it must be as 'causal S8192 H32/4 D128'")
        seqlen, heads_kv, head_dim = map(int, case.groups())
        keys = seqlen // recorded["ranks"] + max(record["keys_fetched"])
        for name, numbers in record["passes"].items():
            backward = name == "backward"
            found.append(
                {
                    "what": f"{record['case']} {name}",
                    "measured": numbers["seconds"]["ranks"],
                    "device": numbers["predicted"].get("device", numbers["predicted"]["ranks"]),
                    "exchanges": len(record["sets"]) * (2 if backward else 1),
                    "parts": keys * heads_kv * 2 * head_dim * FLOAT32_BYTES / 1e9 if backward else 0.0,
                }
            )
    return found


def seconds_of(one: Dict[str, Any], constants: Sequence[float]) -> float:
    start_us, exchange_us, a_gb = constants
    on_device, on_host = one["device"] + a_gb * one["parts"], 1e-6 * exchange_us * one["exchanges"]
    return float(1e-6 * start_us + max(on_device, on_host))


def errors_of(passes: List[Dict[str, Any]], constants: Sequence[float]) -> List[float]:
    return [seconds_of(one, constants) / one["measured"] - 1 for one in passes]


def mean_error(passes: List[Dict[str, Any]], constants: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors_of(passes, constants)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="files of bench_context_parallel.py")
    passes = [one for path in parser.parse_args().results for one in passes_of(path)]
    best: Tuple[float, ...] = min(
        itertools.product(START_US, EXCHANGE_US, SECONDS_A_GB), key=lambda tried: mean_error(passes, tried)
    )
    for one, error in zip(passes, errors_of(passes, best)):
        measured, predicted = 1e3 * one["measured"], 1e3 * seconds_of(one, best)
        print(f"{one['what']:42} measured {measured:7.3f} ms, predicted {predicted:7.3f}, {error:+.0%}")
    before = mean_error(passes, (0, 0, 0))
    largest = max(map(abs, errors_of(passes, best)))
    print(f"host_start {best[0]} us, host_exchange {best[1]} us, sums_bandwidth {1 / best[2]:.0f} GB/s")
    print(f"mean error {mean_error(passes, best):.1%}, largest {largest:.1%}; without them {before:.1%}")


if __name__ == "__main__":
    main()
