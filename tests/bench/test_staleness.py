"""The formula that bench/staleness.py trains with is torch's AdamW with clipped gradients."""

# covers bench/contenders/alone.py bench/contenders/job.py

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import staleness
    from gpt_model import GPT, GPTConfig


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8))


def test_the_formula_is_torchs() -> None:
    ours, theirs = _model(), _model()
    optimizer = staleness.AdamW(ours)
    options = {"betas": (staleness.BETA1, staleness.BETA2), "eps": staleness.EPS}
    expected = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=staleness.WEIGHT_DECAY, **options)
    for step in range(4):
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            (30 * model(tokens[:, :-1], tokens[:, 1:])).backward()  # so that clipping does something
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), staleness.MAX_NORM)
        assert norm > staleness.MAX_NORM
        expected.step()
        expected.zero_grad()
        optimizer.apply(staleness.Update(optimizer.take_gradients(), step + 1, 1e-2))
        optimizer.write_back()
    for mine, param in zip(ours.parameters(), theirs.parameters(), strict=True):
        # A key's bias has a gradient of rounding errors alone, not far from AdamW's eps; updates are 1e-2 each.
        torch.testing.assert_close(mine, param, rtol=1e-4, atol=1e-4)
