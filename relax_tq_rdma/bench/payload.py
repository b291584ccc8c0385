"""Cost of the row format on many small rows: ``python -m relax_tq_rdma.bench.payload [--rows N] [--repeats K]``.

Prints JSON: microseconds a row for encode and decode, minimum and median over the repeats, and whether every byte came
back. Small rows show the fixed cost of a row; what a byte costs is a matter of ``memcpy`` (one copy in, none out).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

SCHEMA = "relax-tq-rdma/bench-payload/1"


def run(rows: int, repeats: int) -> dict[str, object]:
    """Encode and decode ``rows`` rows of two small tensors ``repeats`` times."""
    import torch

    from relax_tq_rdma.payload import decode_row, encode_rows

    batch = [{"pixel_values": torch.randn(10, 10), "image_grid_thw": torch.tensor([[1, 2, 2]])} for _ in range(rows)]
    encode, decode, equal = [], [], True
    for _ in range(repeats):
        begin = time.perf_counter()
        encoded = encode_rows(batch)
        middle = time.perf_counter()
        decoded = [decode_row(row) for row in encoded]
        end = time.perf_counter()
        encode.append((middle - begin) / rows * 1e6)
        decode.append((end - middle) / rows * 1e6)
        equal = equal and all(
            got is not None and all(torch.equal(got[key], want[key]) for key in want)
            for got, want in zip(decoded, batch, strict=True)
        )
    return {
        "schema": SCHEMA,
        "rows": rows,
        "repeats": repeats,
        "encode_us": {"min": min(encode), "median": statistics.median(encode)},
        "decode_us": {"min": min(decode), "median": statistics.median(decode)},
        "bytes_equal": equal,
    }


def main(argv: list[str]) -> int:
    """Entry point; exit status 1 when a byte did not come back."""
    parser = argparse.ArgumentParser(prog="python -m relax_tq_rdma.bench.payload", description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    if args.rows < 1 or args.repeats < 1:
        parser.error("--rows and --repeats must be at least 1")
    result = run(args.rows, args.repeats)
    print(json.dumps(result, indent=2))
    return 0 if result["bytes_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
