from jaxblt.training.stored.cadence import SaveCadence


def test_a_checkpoint_is_due_every_so_many_steps_and_seconds_and_until_it_is_saved() -> None:
    now = [0.0]
    saves = SaveCadence(10, 300.0, clock=lambda: now[0])
    assert not saves.due(9, saves.wanted)
    assert saves.due(10, saves.wanted)
    assert saves.due(11, saves.wanted)
    saves.saved()
    assert not saves.due(12, saves.wanted)
    now[0] = 299.0
    assert not saves.due(13, saves.wanted)
    now[0] = 300.0
    late = saves.wanted
    assert saves.due(14, late)
    saves.saved()
    assert not saves.due(15, saves.wanted)
    assert not saves.due(16, late)  # another process's, a step later
    now[0] = 1e9
    never = SaveCadence(10, None, clock=lambda: now[0])
    assert not never.due(9, never.wanted)
