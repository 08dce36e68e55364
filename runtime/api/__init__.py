"""The contract between programs and the runtime: plain data, one error tree, one protocol. Names only.

Knows the standard library only, so that importing the language never loads torch. Everything that crosses the
seam between `lang` and a backend is defined here; nothing here does model work. Beside the names, to be imported from
where they stand: how a choice is made (`choices`), how calls are written and read (`calls`), a program as data
(`script`), what a caller is told of an error (`faults`).
"""

from niwaki.runtime.api.constraints import (
    AllOf,
    CallFormat,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    Spacing,
    StopRegex,
    Tool,
    ToolCall,
    ToolCalls,
)
from niwaki.runtime.api.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    ConstraintError,
    EngineStopped,
    GenerationError,
    ModelError,
    NiwakiError,
    ProgramError,
    RequestError,
    TimedOut,
    UnknownVariable,
    UnsupportedByBackend,
)
from niwaki.runtime.api.pending import Generation, Pending
from niwaki.runtime.api.protocol import AsksForReaders, Backend, Branch, OffersTools, SharesPlaces
from niwaki.runtime.api.sampling import MAX_LOGIT_BIAS, MAX_STOPS, SamplingOptions, SamplingParams
from niwaki.runtime.api.text import BackendInfo, Delta, FinishReason, Message, Output, Score, Segment, TokenLogprob

__all__ = [
    "AsksForReaders",
    "AllOf",
    "Backend",
    "BackendInfo",
    "Branch",
    "CallFormat",
    "Cancelled",
    "CapacityError",
    "Choices",
    "ConfigError",
    "Constraint",
    "ConstraintError",
    "Delta",
    "EngineStopped",
    "FinishReason",
    "Generation",
    "GenerationError",
    "Grammar",
    "JsonSchema",
    "MAX_LOGIT_BIAS",
    "MAX_STOPS",
    "Message",
    "ModelError",
    "NiwakiError",
    "OffersTools",
    "Output",
    "Pending",
    "ProgramError",
    "Reasoned",
    "Regex",
    "RequestError",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "Segment",
    "SharesPlaces",
    "Spacing",
    "StopRegex",
    "TimedOut",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCalls",
    "UnknownVariable",
    "UnsupportedByBackend",
]
