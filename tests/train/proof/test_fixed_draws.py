"""Fixed random numbers: a part of a batch draws what the same samples draw within the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clusterd.train.proof.fixed_draws import FixedDraws

BY_SAMPLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of channels": lambda x: F.dropout2d(x[..., None, None], 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of an own generator": lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x))),
    "normal": lambda x: torch.normal(x, 0.5),
    "depth": lambda x: x * torch.empty(len(x), 1).bernoulli_(0.7),
    "probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "times": lambda x: x * torch.randint(1, 100, (len(x),))[:, None],
    "choices": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2).float(),
    "multinomial with replacement": lambda x: torch.multinomial(x[:, :2].softmax(-1), 2, replacement=True).float(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[:, None, :, None]] * 3, dropout_p=0.3),
    "time first": lambda x: (x.T[:, :, None] * torch.rand(x.shape[1], len(x), 3)).transpose(0, 1),
}


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_parts_draw_what_the_whole_draws(name: str) -> None:
    x, draw = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), BY_SAMPLE[name]
    fixed = FixedDraws()
    with fixed:
        whole, parts = draw(x), torch.cat([draw(x[:4]), draw(x[4:])])
    assert (bool(fixed.drawn), fixed.is_free) == (True, False)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    "draw", [lambda x: F.rrelu(x, training=True), lambda x: torch.multinomial(x.softmax(-1), 9, replacement=True)]
)
def test_draws_that_are_not_fixed_are_known(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FixedDraws() as fixed:
        draw(torch.randn(8, 6))
    assert (bool(fixed.drawn), fixed.is_free) == (True, True)


def test_a_recurrent_net_has_no_dropout_between_its_layers() -> None:
    net, x = nn.LSTM(3, 5, 2, dropout=0.5, batch_first=True), torch.randn(4, 7, 3)
    with FixedDraws() as fixed:
        one, other = net(x)[0], net(x)[0]
    assert fixed.drawn
    assert torch.equal(one, other)


def test_a_permutation_exchanges_samples() -> None:
    with FixedDraws():
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    "compute", [lambda x: F.dropout(x, 0.0), lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3)]
)
def test_nothing_is_drawn_where_nothing_is_random(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FixedDraws() as fixed:
        compute(torch.ones(4, 4))
    assert not fixed.drawn


def test_a_single_number_is_drawn() -> None:
    with FixedDraws() as drawing:
        one, other = torch.rand(()), torch.rand(())
    assert one == other
    assert len(drawing.drawn) == 2
