"""Errors a user can cause. The command prints them on one line and exits with 2."""


class InputError(ValueError):
    """What was asked for cannot be done; the message says what is wrong and what to do."""


class RankLostError(InputError):
    """Another process that runs a part of the model has ended, or did not answer in time."""


class NonFiniteError(InputError):
    """A value that should be finite is infinite or NaN; the message says where it was first seen."""
