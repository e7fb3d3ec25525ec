"""What can go wrong, as one hierarchy.

SakiyomiError
├── OptionError        an option has a value that can't work (also a ValueError)
├── PromptError        a prompt that can't be answered: empty, too long, no chat template
├── CapacityError      a sequence would outgrow the context
├── DrafterError       a drafter proposed what can't be a draft
├── PolicyError        a policy chose among sampled tokens by what they are
└── ModelError         a model that can't be loaded
    ├── ModelNotFoundError     no such name, folder, file or hub id
    ├── DownloadError          fetching it failed or was refused
    ├── CorruptModelError      truncated, wrong hash, inconsistent
    └── UnsupportedModelError  an architecture, quantisation or feature that we don't run

Every message is one line that names the option or file, the value, and what would work.
"""


class SakiyomiError(Exception):
    """Base of every error that sakiyomi raises on purpose."""


class OptionError(SakiyomiError, ValueError):
    """An option has a value that can't work."""


class PromptError(SakiyomiError, ValueError):
    """A prompt that can't be answered."""


class CapacityError(SakiyomiError):
    """A sequence would outgrow the context. Nothing was computed."""


class DrafterError(SakiyomiError):
    """A drafter proposed what can't be a draft: a mistake in the drafter."""


class PolicyError(SakiyomiError):
    """A policy chose among sampled tokens by what they are, which would change the text: a mistake in the policy."""


class ModelError(SakiyomiError):
    """A model that can't be loaded."""


class ModelNotFoundError(ModelError):
    """No such model name, folder, file or hub id."""


class DownloadError(ModelError):
    """Fetching a model failed."""


class CorruptModelError(ModelError):
    """A model file is truncated, altered or inconsistent."""


class UnsupportedModelError(ModelError):
    """A model uses an architecture, quantisation or feature that sakiyomi doesn't run."""
