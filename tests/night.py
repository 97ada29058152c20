"""What a random run must have gone through to prove something.

The seeds of the day were chosen for it. One of the night (`scripts/night`) may miss it by chance, which is no failure.
"""

is_night = False


def worth_it(went_through: bool) -> None:
    assert went_through or is_night, "the run is only worth something if it went through what it is for"
