"""benchmarks/profile_step.py: products on the stand-in, and a table of kernels."""

from minitransformer.backends.cuda import device
from support.models import tiny_config

SMALL = tiny_config((2, 1), vocab_size=40, d_model=16, d_ff=24)


def test_each_product_is_timed(stand_in, benchmark, monkeypatch):
    profile_step = benchmark("profile_step")
    for name, value in {"REPEATS": 2, "BUSY": 8, "RANDOM": 100}.items():
        monkeypatch.setattr(profile_step, name, value)
    head, *lines, last = profile_step.measure_products(device.current(), SMALL, 24)
    assert head.split()[-2:] == ["us", "TFLOP/s"]
    assert [line[:18].strip() for line in lines] == [
        *("projection", "K, V in one", "Q, K, V in one"),
        *("feed-forward 1", "feed-forward 2", "logits"),
    ]
    assert [line.split()[-9:-6] for line in lines][-1] == ["24", "16", "40"]
    assert last.startswith("wider products would save ")
