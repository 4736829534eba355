"""What was said on the command line and changes nothing: named on stderr, one line each. Pure."""

from __future__ import annotations

import argparse

from thinpipe.harness.acsgd.arguments import rows
from thinpipe.harness.acsgd.mapping import COMPRESSED_DP, compresses, data_parallel, uses_cache


def notes(args: argparse.Namespace) -> list[str]:
    """A line for each argument that was given and has no effect, and for what is done otherwise than it says."""
    idle = without_effect(args)
    lines = [f"{name} has no effect: {why}" for name, why in idle.items() if name in args.given]
    lines += [f"{name} was given more than once: the last one counts" for name in args.repeated]
    if args.data_group_size > 1 and args.dp_mode in ("central_ps", "sharded_ps"):
        lines.append(f"--dp-mode {args.dp_mode}: gradients are averaged by one all-reduce, as with allreduce")
    return lines


def without_effect(args: argparse.Namespace) -> dict[str, str]:
    """Argument -> why it has no effect beside the others."""
    idle = {row.name: row.difference for row in rows() if row.dead}
    for direction in ("forward", "backward"):
        named, method = getattr(args, direction), getattr(args, f"{direction}_compress_method")
        if named is not None or method == "none":
            why = f"--{direction} says it all" if named is not None else f"--{direction}-compress-method is none"
            names = ("bits", "scale-method", "scale-dims") + (("bits-act",) if direction == "forward" else ())
            idle |= {f"--{direction}-{name}": why for name in names}
    if args.forward is None and args.forward_compress_method not in ("none", "delta-lowbits"):
        idle["--forward-bits-act"] = "it is delta-lowbits' alone"
    if not uses_cache(args):
        idle["--max-activation-cache-size"] = "no delta method is used"
    if args.data_group_size == 1:
        idle["--dp-mode"] = idle["--dp-bits"] = "there is one data group"
    elif data_parallel(args)["exchange"] != "quantized-adam":
        idle["--dp-bits"] = f"it is --dp-mode {COMPRESSED_DP}'s alone"
    if not compresses(args):
        idle["--warmup-epochs"] = "nothing is compressed"
    if args.dropout == 0:
        idle["--dropout-masks"] = "dropout is off"
    if args.profiling == "no-profiling":
        idle["--trace-postfix"] = "no trace is written"
    return idle
