"""What `bench shape` aims at stays true: no file grows into another's room while nobody looks."""

from bench import shape


def test_every_aim_of_the_repositorys_shape_is_met() -> None:
    result = shape.run(quick=False)
    missed = {name: aim for name, aim in result.aims.items() if not aim.met}
    assert not missed, {name: result.figures[name] for name in missed}
