"""What a pass tells: nothing too early, nothing twice, groups of layers, chunk behind chunk."""

from fastdeploy_kvcache_v1.transfer.layer_progress import LayerProgress

LAYERS = 4


def progress(group_bytes=1):
    told = []
    made = LayerProgress(lambda *what: told.append(what), num_layers=LAYERS, layer_bytes=10, group_bytes=group_bytes)
    return made, told


def compute(made, chunks, *, up_to=LAYERS, computed=None):
    """A pass that ends before layer `up_to` begins, if that is one."""
    made.begin(chunks)
    for layer in range(min(up_to, LAYERS)):
        made.reached(layer)
    if up_to == LAYERS:
        made.finish([lease for lease, _ in chunks] if computed is None else computed)


def test_a_layer_is_told_when_the_next_one_begins():
    made, told = progress()
    made.begin([("a", 3)])
    for layer, expected in enumerate([[], [("a", 3, 1)], [("a", 3, 2)], [("a", 3, 3)]]):
        made.reached(layer)
        assert told == expected
        told.clear()
    made.finish(["a"])
    assert told == [("a", 3, 4)]


def test_small_layers_are_told_together():
    made, told = progress(group_bytes=60)
    compute(made, [("a", 3), ("b", 1)])
    assert told == [("a", 3, 2), ("a", 3, 4), ("b", 1, 4)]


def test_a_pass_that_is_computed_again_tells_nothing_twice():
    made, told = progress()
    compute(made, [("a", 2), ("b", 2)], up_to=3)  # a copy for b fails in layer 2
    compute(made, [("a", 2)])
    assert [what for what in told if what[0] == "a"] == [("a", 2, 1), ("a", 2, 2), ("a", 2, 3), ("a", 2, 4)]
    assert [what for what in told if what[0] == "b"] == [("b", 2, 1), ("b", 2, 2)]


def test_a_chunk_that_completes_no_block_is_not_told():
    made, told = progress()
    compute(made, [("a", 0)])
    assert told == []
    compute(made, [("a", 2)])
    compute(made, [("a", 2)])
    compute(made, [("a", 5)])
    assert told == [("a", end, layer) for end in (2, 5) for layer in range(1, LAYERS + 1)]


def test_failed_chunk_is_not_told_complete_and_ended_lease_not_at_all():
    made, told = progress()
    compute(made, [("a", 2), ("b", 2)], computed=["b"])
    assert ("a", 2, LAYERS) not in told
    assert told[-1] == ("b", 2, LAYERS)
    told.clear()
    made.begin([("c", 2)])
    made.forget("c")
    made.reached(3)
    made.finish(["c"])
    assert told == []
    made.forget("a")
    made.forget("b")
    assert len(made) == 0
