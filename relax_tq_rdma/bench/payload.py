"""Cost of the row format on many small rows: ``relax-tq-rdma bench payload``.

Small rows show the fixed cost of a row; what a byte costs is a matter of ``memcpy`` (one copy in, none out).
"""

from __future__ import annotations

import json
import statistics
import time

from relax_tq_rdma.usage import Parser, positive

SCHEMA = "relax-tq-rdma/bench-payload/1"
DESCRIPTION = """\
Measure what the row format costs on many small rows. Prints one JSON object: microseconds a row for encode and decode,
minimum and median over the repeats, and whether every byte came back. Exit code: 0 it did, 1 it did not, 2 wrong
usage."""


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
    """Measure and print.

    Raises:
        UsageError: a wrong flag or value.
    """
    parser = Parser(prog="relax-tq-rdma bench payload", description=DESCRIPTION)
    parser.add_argument("--rows", type=positive, default=4096, metavar="N", help="rows of a batch (default: 4096)")
    parser.add_argument("--repeats", type=positive, default=15, metavar="N", help="measured rounds (default: 15)")
    args = parser.parse_args(argv)
    result = run(args.rows, args.repeats)
    print(json.dumps(result, indent=2))
    return 0 if result["bytes_equal"] else 1
