import tracemalloc

import log_cost

from kmp import advise, load_run


def test_log_has_samples_and_updates_that_advice_uses(tmp_path):
    log = log_cost.write(tmp_path / "log", variables=3, samples=20)
    run = load_run(log)
    assert [sample.step for sample in run.samples] == list(range(250, 5001, 250))
    assert [number for number, sample in enumerate(run.samples) if sample.weight_norm[0] > 0] == [
        0,
        10,
    ]
    assert [sample.histogram.total for sample in run.samples] == [4096 + 64 + 4096] * 20
    assert "in 20 samples" in advise(run).verdict


def test_log_of_a_size_ends_with_the_record_that_reaches_it(tmp_path):
    for variables in (0, 3):
        log = (
            log_cost.write(tmp_path / str(variables), variables, megabytes=0.01)
            / log_cost.FILE_NAME
        )
        assert 10_000 <= log.stat().st_size < 11_000
        assert (
            len(load_run(log.parent).samples) > 1 if variables else not load_run(log.parent).samples
        )


def test_memory_to_load_and_advise_on_small_samples_is_a_few_times_the_log(tmp_path):
    folder = log_cost.write(tmp_path / "log", variables=1, megabytes=0.5)
    advise(load_run(folder))  # what is allocated once
    tracemalloc.start()
    try:
        run = load_run(folder)
        loaded, _ = tracemalloc.get_traced_memory()
        advise(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (folder / log_cost.FILE_NAME).stat().st_size
    assert loaded < 6 * size
    assert peak < 11 * size
