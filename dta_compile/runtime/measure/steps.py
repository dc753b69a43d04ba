"""A line for every call, on request: `TORCH_LOGS=+dta_compile.runtime.measure.steps`, or DEBUG for the logger below."""

from __future__ import annotations

import logging

from dta_compile.plan import Plan
from dta_compile.plan.scalars import step_line

# Called after this module, as TORCH_LOGS wants it, so that it can be asked for alone.
logger = logging.getLogger(__name__)


def log(plan: Plan) -> None:
    """Log a plan whose runs have been measured."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("dta: %s", step_line(plan.stats, plan.estimates, plan.schedule.strategy))
