"""The options that say how a token is chosen and when an answer ends, for generate and chat.

Invariant: a sampled run always knows its seed: one that was not given is drawn and reported.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import click

from edge_runtime.cli.options import FLOAT, F, Whole

if TYPE_CHECKING:
    from edge_runtime.decode.sampling import Sampling

_OPTIONS = (
    click.option(
        "-n",
        "--new-tokens",
        type=Whole(min=1),
        default=512,
        show_default=True,
        metavar="N",
        help="Tokens to generate at most.",
    ),
    click.option(
        "--temp", type=FLOAT, default=0.0, show_default=True, help="Temperature; 0 is greedy."
    ),
    click.option(
        "--top-p", type=FLOAT, default=1.0, show_default=True, help="Likeliest tokens up to P."
    ),
    click.option(
        "--top-k",
        type=Whole(0),
        default=0,
        show_default=True,
        help="The K likeliest tokens; 0: all.",
    ),
    click.option(
        "--min-p",
        type=FLOAT,
        default=0.0,
        show_default=True,
        help="Only tokens at least this share as likely as the likeliest.",
    ),
    click.option(
        "--repetition-penalty",
        type=FLOAT,
        default=1.0,
        show_default=True,
        help="Divides logits of tokens that occurred; 1 is off.",
    ),
    click.option(
        "--presence-penalty",
        type=FLOAT,
        default=0.0,
        show_default=True,
        help="Subtracted from logits of tokens in the answer; 0 is off.",
    ),
    click.option(
        "--seed",
        type=Whole(0, 2**64 - 1),
        metavar="S",
        help="Seed of a sampled answer.  [default: a new one each time, reported]",
    ),
)


def sampling_options(command: F) -> F:
    """Add -n and the sampling options, which arrive under the names of `make_sampling`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def make_sampling(
    *,
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    seed: int | None,
) -> Sampling:
    """Build the `Sampling`; draws a seed if one is needed. Raises UsageError for a bad value."""
    from edge_runtime.decode.sampling import Sampling

    if seed is None:
        seed = secrets.randbits(32) if temp > 0 else 0
    return Sampling(
        temperature=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
