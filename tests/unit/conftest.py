"""Settings of the unit tests."""

from hypothesis import settings

# No deadline: other work on the machine must not fail a test. A failing example prints how to see it again.
settings.register_profile("unit", deadline=None, max_examples=150, database=None, print_blob=True)
settings.load_profile("unit")
