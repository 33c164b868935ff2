"""Errors that a user can mend: one line that names the field, the value, the bound and the remedy."""


class ReelkeepError(Exception):
    """Base of every error that is the input's, the configuration's or the machine's doing.

    Jobs print `str(error)` and exit; they never show a stack trace for one of these.
    """


class ConfigError(ReelkeepError, ValueError):
    """A setting, or a combination of settings, that can't work."""


class InputError(ReelkeepError, ValueError):
    """A video, an image, a block or a question that can't be used as it is."""


class PositionLimitError(InputError):
    """The input would run past the last rotary position that the model was made for."""


class CacheMismatchError(ReelkeepError, ValueError):
    """A compressed cache that another model, revision or layout wrote, or that was damaged."""


class NumericalError(ReelkeepError, ArithmeticError):
    """The model returned NaN or infinite logits; no answer can be read from them."""


class OutOfMemoryError(ReelkeepError, MemoryError):
    """The device has no room for a block, even after halving it."""
