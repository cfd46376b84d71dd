"""Every error this package raises on purpose. Each message names the value, the limit and the way out."""


class ParityError(RuntimeError):
    """Something lies outside the numerics contract; going on could change bits silently."""


class ContractError(ParityError):
    """A contract is malformed, or two sides run different contracts."""


class BackendError(ParityError):
    """The chosen backend is missing or does not serve a constant, dtype, layout or shape."""


class LayoutError(ParityError):
    """A parallel layout that cannot give equal bits, or that one side cannot have."""


class PatchError(ParityError):
    """A patch target is missing, has changed, or is held by somebody else."""


class RequestError(ParityError, ValueError):
    """A request that an engine cannot answer within the contract; a `ValueError`, so that a server answers it with status 400."""


class InputError(ValueError):
    """Bad user input (a file, an option, a model directory): exit status 2."""
