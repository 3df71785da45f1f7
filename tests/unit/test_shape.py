"""What `bench shape` aims at stays true: no file grows into another's room while nobody looks."""

from bench import shape


def test_every_aim_of_the_repositorys_shape_is_met() -> None:
    figures = shape.figures_with_aims(list(shape.read(shape.PACKAGE)))
    missed = [name for name, aim in shape.aims(figures).items() if not aim.met]
    assert not missed, {name: figures[name] for name in missed}
