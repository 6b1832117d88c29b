"""The one error tree. Every error has a `code` (stable, on the wire), an HTTP `status` and says whether a retry may help.

HeadraceError                     internal_error            500
├── InvalidRequest                invalid_request           400   names the field in `field`
│   ├── ContextTooLong            context_length_exceeded   400
│   ├── BodyTooLarge              body_too_large            413
│   └── UnknownModel              model_not_found           404
├── DeadlineExceeded              deadline_exceeded         504   names the stage in `stage`; retryable
├── Cancelled                     cancelled                 499
├── Overloaded                    overloaded                429   retryable
├── Unavailable                   unavailable               503   retryable
│   ├── WorkerLost                worker_lost               503   retryable
│   ├── StoreLost                 store_lost                503   retryable
│   └── RegistryLost              registry_lost             503   retryable
├── TransferFailed                transfer_failed           503   retryable
│   ├── PeerGone                  peer_gone                 503   retryable
│   └── TransferTimeout           transfer_timeout          504   retryable
├── Fenced                        fenced                    409   a late write or answer of an attempt that is over
├── LayoutMismatch                layout_mismatch           409   two processes that must not pair
├── CorruptBlock                  corrupt_block             500   checksum mismatch: a miss, never wrong tokens
├── IllegalTransition             illegal_transition        500   a state machine was asked for a move that its table lacks
├── IntegrityViolation            integrity_violation       500   a conservation law is broken
└── ConfigError                   config_error              500   refused before anything starts
"""


class HeadraceError(Exception):
    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, *, field: str | None = None, stage: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.stage = stage


class InvalidRequest(HeadraceError):
    code, status = "invalid_request", 400


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    code, status = "body_too_large", 413


class UnknownModel(InvalidRequest):
    code, status = "model_not_found", 404


class DeadlineExceeded(HeadraceError):
    code, status, retryable = "deadline_exceeded", 504, True


class Cancelled(HeadraceError):
    code, status = "cancelled", 499


class Overloaded(HeadraceError):
    code, status, retryable = "overloaded", 429, True


class Unavailable(HeadraceError):
    code, status, retryable = "unavailable", 503, True


class WorkerLost(Unavailable):
    code = "worker_lost"


class StoreLost(Unavailable):
    code = "store_lost"


class RegistryLost(Unavailable):
    code = "registry_lost"


class TransferFailed(HeadraceError):
    code, status, retryable = "transfer_failed", 503, True


class PeerGone(TransferFailed):
    code = "peer_gone"


class TransferTimeout(TransferFailed):
    code, status = "transfer_timeout", 504


class Fenced(HeadraceError):
    code, status = "fenced", 409


class LayoutMismatch(HeadraceError):
    code, status = "layout_mismatch", 409


class CorruptBlock(HeadraceError):
    code = "corrupt_block"


class IllegalTransition(HeadraceError):
    code = "illegal_transition"


class IntegrityViolation(HeadraceError):
    code = "integrity_violation"


class ConfigError(HeadraceError):
    code = "config_error"


def _tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


ERRORS: dict[str, type[HeadraceError]] = {error.code: error for error in _tree(HeadraceError)}


def error_from_code(code: str, message: str, *, stage: str | None = None, field: str | None = None) -> HeadraceError:
    """The error that a peer named by its code; a code of a newer peer becomes the root error."""
    return ERRORS.get(code, HeadraceError)(message, stage=stage, field=field)
