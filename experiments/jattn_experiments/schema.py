"""The config as frozen dataclasses: task, model, training, evaluation, devices and claims."""

import dataclasses
import enum
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned: the options of all tasks, of which ``jattn_experiments.tasks`` takes those of the kind.

    Attributes:
        kind: "copy" (from four places at once), "copy_string" (BOS s SEP s), "shift_bank" (from fixed distances),
            "induction" (what followed the previous occurrence), "skills" (fixed distances and values), or one of
            published papers: "markov" (the next symbol of a new Markov chain), "recall" (values of keys), "histogram"
            (how often a token occurs), "hop" (induction several times) or "text" (the next word of Python's
            documentation).
        symbols: Number of distinct values to copy; recall: size of the vocabulary.
        length: Tokens in a sequence (copy: twice the number of keys); copy_string has its own lengths.
        shortest: Shortest string of copy_string in training; shortest period of induction; shortest sequence of
            histogram.
        longest: Longest string of copy_string in training; longest period of induction.
        farthest: copy_string: longest string in the curve over length.
        offsets: shift_bank: distances back to copy from.
        pairs: recall: keys and values in a sequence.
        hops: hop: most hops.
        prior: markov: what rows of transitions are drawn from; doubly_stochastic takes two symbols.
    """

    kind: str = "copy"
    symbols: int = 16
    length: int = 32
    shortest: int = 4
    longest: int = 20
    farthest: int = 40
    offsets: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 4, 7])
    pairs: int = 4
    hops: int = 2
    prior: Literal["dirichlet", "doubly_stochastic"] = "dirichlet"


@dataclasses.dataclass(frozen=True)
class Model:
    """The transformer.

    Attributes:
        num_layers: Layers, with one attention each.
        num_heads: Query heads per layer.
        num_kv_heads: Key/value heads; null means num_heads.
        model_dim: Width of the residual stream.
        head_dim: Dimension of a query/key head.
        value_dim: Dimension of a value head; null means head_dim.
        mlp_dim: Hidden width of the MLP after each attention; 0: no MLP.
        norm: Whether attention, MLP and read-out have layer norms before them.
        position: How positions are encoded; "relative": a learned bias over distances, "relative_keys": a learned
            vector for each distance, whose product with a query is added to its score.
        rotary_base: rotary: base of the wavelengths.
        embed_scale: Standard deviation of the initial embeddings.
        kernel_scale: Standard deviation of the initial kernels; null means LeCun's.
        causal: Whether a query sees the tokens up to its own only, or all.
        window: Tokens that a query sees, up to its own; null means all.
        tied: Whether the read-out is the embedding of the tokens.
    """

    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int | None = None
    model_dim: int = 64
    head_dim: int = 16
    value_dim: int | None = None
    mlp_dim: int = 0
    norm: bool = True
    position: Literal["none", "sinusoidal", "learned", "rotary", "alibi", "relative", "relative_keys"] = "learned"
    rotary_base: float = 10000.0
    embed_scale: float = 1.0
    kernel_scale: float | None = None
    causal: bool = True
    window: int | None = None
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Train:
    """Training: AdamW or Muon with warm-up, cosine decay and clipping.

    Attributes:
        seeds: Number of seeds, trained at once.
        first_seed: The first seed; the others follow it.
        steps: Updates.
        batch: Sequences per update.
        optimizer: "adamw"; or Muon for the kernels and AdamW for the rest: "muon" as optax has it, which takes every
            array of two axes and so none of attention's kernels, "muon_joint" with all heads of a kernel as one matrix,
            "muon_per_head" with a matrix for each.
        learning_rate: Peak learning rate.
        muon_rate: Muon: peak learning rate of what it takes; AdamW's is learning_rate.
        final_rate: Learning rate at the end, as a fraction of the peak.
        warmup: Steps of linear warm-up.
        b2: Decay of Adam's second moment.
        weight_decay: AdamW's weight decay.
        clip: Maximum global gradient norm.
        entropy_penalty: Loss weight of the heads' mean entropy (0 to 1); makes heads choose.
        entropy_after: Share of the steps (0 to 1) after which that penalty begins; heads choose sooner without it.
        entropy_below: Loss in nats below which that penalty counts, in each step and for each seed: heads that have
            yet to learn are let alone; null means any loss.
        place_weights: Loss weight of each place; null means 1 each.
        log_every: Steps averaged in each line of metrics.
        look_every: Steps between looks at the heads.
        checkpoint_every: Steps between checkpoints, a multiple of look_every.
        keep: Newest checkpoints to keep; 0 keeps all.
        start: A run's folder, or FOLDER@STEP for one of its checkpoints, whose parameters training starts from; empty:
            random ones. Read once: a run that resumes does not need it.
    """

    seeds: int = 5
    first_seed: int = 0
    steps: int = 800
    batch: int = 32
    optimizer: Literal["adamw", "muon", "muon_joint", "muon_per_head"] = "adamw"
    learning_rate: float = 3e-3
    muon_rate: float = 0.02
    final_rate: float = 0.1
    warmup: int = 50
    b2: float = 0.99
    weight_decay: float = 1e-4
    clip: float = 1.0
    entropy_penalty: float = 0.0
    entropy_after: float = 0.0
    entropy_below: float | None = None
    place_weights: list[float] | None = None
    log_every: int = 10
    look_every: int = 50
    checkpoint_every: int = 200
    keep: int = 2
    start: str = ""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Evaluation.

    Attributes:
        batch: Fresh sequences per seed.
        lengths: copy_string: lengths in the curve over length.
        look_length: shift_bank: tokens per sequence when looking at heads, if the weights of whole sequences do
            not fit; null means task.length. Loss and accuracy always use whole sequences.
    """

    batch: int = 1024
    lengths: list[int] = dataclasses.field(default_factory=list)
    look_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The devices that train together: data x heads x sequence.

    Attributes:
        data: Devices that split the sequences of a batch.
        heads: Devices that split the heads of each attention, and their parameters.
        sequence: Devices that split the tokens of each sequence.
    """

    data: int = 1
    heads: int = 1
    sequence: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.heads * self.sequence


@dataclasses.dataclass(frozen=True)
class SentenceEncoder:
    """A pretrained sentence encoder, examined instead of trained.

    Attributes:
        folder: Folder of a saved BERT-family model, with config.json, *.safetensors and tokenizer.json.
        package: Installed package that contains the folder; empty if none.
        groups: Groups of sentences with the same meaning.
    """

    folder: str = ""
    package: str = ""
    groups: list[list[str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A pretrained language model, examined instead of trained.

    Attributes:
        model: "smollm2", "gemma3", a GGUF file, or the folder of a saved model that jattn.interop loads; empty if none.
        first: Token that every sequence begins with.
        seed: Of the random tokens, the choice of text and the matched groups.
        sequences: Sequences of random tokens that heads are chosen on, as many others that they are tested on, and
            as many of text from the Python documentation (pydoc_data of the standard library).
        period: Random tokens before they repeat; every sequence has 1 + 2 * period tokens.
        group: Heads in a group: those with the largest score.
        matched: Random groups that each group is compared with, matched in layer and output norm.
    """

    model: str = ""
    first: str = ""
    seed: int = 0
    sequences: int = 4
    period: int = 128
    group: int = 10
    matched: int = 20


@dataclasses.dataclass(frozen=True)
class LongTexts:
    """What a language model's heads do in long texts; no toy model is trained.

    Attributes:
        lengths: Tokens of a text with a needle, its question and answer; empty: no long texts. Text and needles are
            those of language.seed.
        depths: Places of the needle, evenly from the start of the text to its end; a single one is the middle.
        chosen: Texts on which heads are chosen: of the Python documentation, then of its library's source.
        texts: Others on which all is judged: of the documentation, the source, and packages' licences.
        ablated: Tokens of the texts on which heads are chosen, switched off, or hindered from seeing the needle.
        sizes: How many of the heads with the largest retrieval scores are switched off, in the curve; at most half of
            all.
        distances: Tokens between a random sequence and its repeat.
        window: Tokens that a query sees in a cache that rolls.
        streamed: Tokens read through that cache.
        pictured: Tokens of the text whose weights the report shows in blocks.
        windows: Of a model some of whose layers have a window: other windows, which they are given without training.
    """

    lengths: list[int] = dataclasses.field(default_factory=list)
    depths: int = 5
    chosen: int = 3
    texts: int = 4
    ablated: int = 1024
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 5, 10, 20, 40])
    distances: list[int] = dataclasses.field(default_factory=lambda: [16, 64, 256, 1024, 4096, 8000])
    window: int = 512
    streamed: int = 4096
    pictured: int = 8192
    windows: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Circuits:
    """Circuits of a language model, chosen on some pairs of texts and judged on others; no toy model is trained.

    Attributes:
        pairs: Pairs of texts on which edges are chosen, and others on which they are judged; 0: no circuits. Names and
            random tokens are those of language.seed.
        steps: Inputs on the way from corrupt to clean at which derivatives are taken (EAP-IG).
        sizes: Edges of the circuits.
        lengths: Tokens of a sequence that repeats, the first for all that is told of copying; more than one: whether
            the circuit is the same at all.
        compared: Edges of the circuits that are compared over lengths, and whose page is written; one of sizes.
    """

    pairs: int = 0
    steps: int = 5
    sizes: list[int] = dataclasses.field(default_factory=lambda: [30, 100, 300, 700, 2000])
    lengths: list[int] = dataclasses.field(default_factory=lambda: [64, 512, 2048])
    compared: int = 700


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim: a metric, its threshold, and how many seeds must pass.

    Attributes:
        name: Short name.
        statement: The claim in words.
        metric: A metric of the run; of a control, as CONTROL:METRIC; of a point of the sweep, as
            OPTION=VALUE:METRIC.
        minus: Another one, which is taken away from it on each seed; null for none.
        needed: Number of seeds that must pass.
        at_least: Lower bound on the metric; give this or at_most.
        at_most: Upper bound on the metric.
    """

    name: str
    statement: str
    metric: str
    needed: int
    minus: str | None = None
    at_least: float | None = None
    at_most: float | None = None


class Kind(enum.Enum):
    """What a run does with its config."""

    TRAINING = "trains a transformer on a task"
    SENTENCE_ENCODER = "examines a saved sentence encoder"
    LANGUAGE_MODEL = "examines a saved language model, beside a toy model that it trains"
    LONG_TEXTS = "examines a saved language model on long texts"
    CIRCUITS = "looks for circuits of a saved language model"


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        name: Name of the experiment; the run folder is runs/NAME unless --out says otherwise.
        description: One or two sentences for the top of the report.
        task: What is learned.
        model: The transformer.
        train: Training.
        evaluate: Evaluation.
        mesh: The devices that train together; a run can resume on another mesh.
        pretrained: A sentence encoder to examine; task, model, train and evaluate must then be left out.
        language: A language model to examine; task, model, train and evaluate are those of a toy model, which is
            trained and examined beside it.
        long: The long texts on which the language model is examined instead; there is no toy model then.
        circuits: The circuits of the language model that are looked for instead; there is no toy model then.
        controls: Variants for comparison, trained by the same loop: name -> dotted overrides.
        sweep: Option -> values; each combination is another control. If the first option is numeric, curves are
            drawn over it. A value may bring others along: {model.model_dim: 256, train.learning_rate: 1.0e-3}.
        claims: What the run should show.
    """

    name: str
    description: str = ""
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    train: Train = dataclasses.field(default_factory=Train)
    evaluate: Evaluate = dataclasses.field(default_factory=Evaluate)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    pretrained: SentenceEncoder = dataclasses.field(default_factory=SentenceEncoder)
    language: LanguageModel = dataclasses.field(default_factory=LanguageModel)
    long: LongTexts = dataclasses.field(default_factory=LongTexts)
    circuits: Circuits = dataclasses.field(default_factory=Circuits)
    controls: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    claims: list[Claim] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> Kind:
        """What a run does: it examines the saved model of the section that is given, or else trains."""
        if self.pretrained != SentenceEncoder():
            return Kind.SENTENCE_ENCODER
        if self.long.lengths:
            return Kind.LONG_TEXTS
        if self.circuits.pairs:
            return Kind.CIRCUITS
        return Kind.LANGUAGE_MODEL if self.language != LanguageModel() else Kind.TRAINING


SECTIONS: dict[str, type] = {
    field.name: field.default_factory
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(field.default_factory)
}
