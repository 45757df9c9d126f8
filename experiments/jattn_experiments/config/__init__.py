"""Configs of experiments: the schema, the rules for its values, and how configs are read."""

from jattn_experiments.config.controls import points_of as points_of
from jattn_experiments.config.controls import variants as variants
from jattn_experiments.config.load import CONFIGS as CONFIGS
from jattn_experiments.config.load import Request as Request
from jattn_experiments.config.load import changed_options as changed_options
from jattn_experiments.config.load import differences as differences
from jattn_experiments.config.load import load as load
from jattn_experiments.config.load import read as read
from jattn_experiments.config.parser import Parser as Parser
from jattn_experiments.config.parser import Processes as Processes
from jattn_experiments.config.parser import of_plain as of_plain
from jattn_experiments.config.parser import scaled_claims as scaled_claims
from jattn_experiments.schema import Circuits as Circuits
from jattn_experiments.schema import Claim as Claim
from jattn_experiments.schema import Config as Config
from jattn_experiments.schema import Evaluate as Evaluate
from jattn_experiments.schema import Kind as Kind
from jattn_experiments.schema import LanguageModel as LanguageModel
from jattn_experiments.schema import LongTexts as LongTexts
from jattn_experiments.schema import Mesh as Mesh
from jattn_experiments.schema import Model as Model
from jattn_experiments.schema import SentenceEncoder as SentenceEncoder
from jattn_experiments.schema import Task as Task
from jattn_experiments.schema import Train as Train
