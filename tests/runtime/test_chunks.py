"""Several stages on one rank: steps beside one process, on thread ranks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopar.program.lines import Pipeline
from autopar.verifier import verify_pipeline
from tests.helpers.captures import analysis_of, batch_of
from tests.helpers.pipeline_harness import Layout, ends_before, random_pipeline
from tests.helpers.pipeline_models import Skip, Tied
from tests.helpers.ranks import (
    above,
    compare_with,
    random_parameters,
    run_ranks,
    named_inputs,
    wrong_in_step,
)
