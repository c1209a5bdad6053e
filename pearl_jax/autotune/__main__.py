"""Measures tiles for named shapes, or those given, on the visible GPU.

  python -m pearl_jax.autotune --shapes glm5.3 32x6144x4096 --rows 16 64 256
  python -m pearl_jax.autotune --shapes glm5.3 --arch sm_90a

Shapes are g x k x n, or the model whose experts on one device are meant. A line for each
problem: form, g, k, n, mean rows of a group, the best tile, date, and the microseconds of
every tile. Lines go into the user's table too, and what that has is not measured again.
With --arch nothing is measured, and no GPU is needed: only the cost model is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re

from pearl_jax import model_shapes, tiling, tuned
from pearl_jax.autotune import explanation, tune

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)


def _shapes(text):
    """The shapes that an argument names, as (g, k, n)."""
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        return [tuple(map(int, text.split("x")))]
    for name in model_shapes.MODELS:
        if _letters(name) == _letters(text):
            return [dataclasses.astuple(case.shape) for case in model_shapes.select([name])]
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither g x k x n nor one of {', '.join(model_shapes.MODELS)}"
    )


def _letters(name):
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m pearl_jax.autotune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", type=_shapes, nargs="+", required=True, metavar="SHAPE")
    parser.add_argument("--forms", nargs="+", choices=tiling.FORMS, default=tiling.FORMS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="mean of a group")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each time")
    parser.add_argument("--again", action="store_true", help="what the table has, too")
    parser.add_argument("--explain", action="store_true", help="print the cost model's view")
    parser.add_argument("--arch", choices=tiling.ARCHS, help="measure nothing; implies --explain")
    options = parser.parse_args(arguments)
    if min(*options.rows, options.rounds) < 1:
        parser.error("--rows and --rounds must be at least 1")
    problems = dict.fromkeys(
        tuned.Problem.of(form, g * rows, k, n, g)
        for g, k, n in itertools.chain(*options.shapes)
        for form in options.forms
        for rows in options.rows
    )
    if options.arch:
        for problem in problems:
            print(problem)
            print(explanation(options.arch, problem))
        return
    try:
        tune(problems, again=options.again, explain=options.explain, rounds=options.rounds)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
