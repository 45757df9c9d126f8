"""Creates pages that show what the heads of any model do, and surveys what each head is needed for."""

from jattn.reports._head_report import Report, report
from jattn.reports._language_model import LanguageModel, next_token_loss
from jattn.reports._paths_into import Paths
from jattn.reports._survey import Survey, survey

__all__ = ["LanguageModel", "Paths", "Report", "Survey", "next_token_loss", "report", "survey"]
