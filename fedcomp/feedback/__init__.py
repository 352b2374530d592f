"""Feedback: how what compression lost in one round is made up for in later ones. A scheme a file.

| name | who remembers | what |
|---|---|---|
| none | nobody | |
| ef | client | the residual: what was not sent |
| dgc | client | residual and momentum |
| ef21 | client and server | an estimate of the client's update |
| cafe | the server, which tells | the last mean update, as the predictor of the next one |
| fetchsgd | server | momentum and residual, as sketches |

A feedback wraps codecs and is not one: it owns memory across rounds. The memory belongs to the caller: it goes in, the
next one comes out, nothing is kept here. Clients commit it only once the server has said that it used the upload.
"""

from fedcomp.feedback.cafe import CAFe, CAFeGuard
from fedcomp.feedback.dgc import DGC
from fedcomp.feedback.ef21 import EF21, EF21Server
from fedcomp.feedback.error import ErrorFeedback
from fedcomp.feedback.fetchsgd import FetchSGD, FetchSGDServer
from fedcomp.feedback.scheme import EMPTY, Feedback, Memory, NoFeedback, as_feedback, feedbacks

__all__ = [
    "DGC",
    "EF21",
    "EMPTY",
    "CAFe",
    "CAFeGuard",
    "EF21Server",
    "ErrorFeedback",
    "Feedback",
    "FetchSGD",
    "FetchSGDServer",
    "Memory",
    "NoFeedback",
    "as_feedback",
    "feedbacks",
]
