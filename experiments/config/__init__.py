"""Configs of experiments: the schema, the rules for its values, and how it is read."""

from experiments.config.controls import variants as variants
from experiments.config.load import Asked as Asked
from experiments.config.load import differences as differences
from experiments.config.load import load as load
from experiments.config.load import read as read
from experiments.config.parser import Parser as Parser
from experiments.config.parser import Processes as Processes
from experiments.config.parser import of_plain as of_plain
from experiments.config.schema import Claim as Claim
from experiments.config.schema import Config as Config
from experiments.config.schema import Evaluate as Evaluate
from experiments.config.schema import Kind as Kind
from experiments.config.schema import LanguageModel as LanguageModel
from experiments.config.schema import Mesh as Mesh
from experiments.config.schema import Model as Model
from experiments.config.schema import SentenceEncoder as SentenceEncoder
from experiments.config.schema import Task as Task
from experiments.config.schema import Train as Train
