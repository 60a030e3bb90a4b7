"""Python's garbage collector in processes that serve many small things for long."""

import gc


def spare() -> None:
    """Let the collector look only at what comes from now on, and less often.

    What is imported lives as long as the process. Going through it takes a tenth of a second, in which
    nobody is answered, and calls that had to wait then wait for each other; and it costs a worker a
    sixth of its CPU time (`bench/orchestration`, `bench/gateway`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
