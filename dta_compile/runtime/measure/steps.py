"""Log a line per call: `TORCH_LOGS=+dta_compile.runtime.measure.steps`, or level DEBUG of the logger below."""

from __future__ import annotations

import logging

from dta_compile.plan import Plan
from dta_compile.plan.summary import step_line

# Named after this module, so that TORCH_LOGS can select it alone.
logger = logging.getLogger(__name__)


def log(plan: Plan) -> None:
    """Log a plan whose runs have been measured."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("dta: %s", step_line(plan.stats, plan.estimates, plan.schedule.strategy))
