"""The config as frozen dataclasses: task, model, training, evaluation, devices and claims."""

import dataclasses
import enum
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Task:
    """The task: the options of all kinds, from which ``jattn_experiments.tasks`` takes those of the chosen kind.

    Attributes:
        kind: "copy" (from four places at once), "copy_string" (BOS s SEP s), "shift_bank" (from fixed distances),
            "induction" (what followed the previous occurrence), "skills" (fixed distances and values), or a task from
            a published paper: "markov" (the next symbol of a new Markov chain), "recall" (values of keys), "histogram"
            (how often a token occurs), "hop" (induction several times) or "text" (the next word of Python's
            documentation).
        symbols: Number of distinct values to copy; recall: size of the vocabulary.
        length: Tokens in a sequence (copy: twice the number of keys). copy_string uses shortest and longest instead.
        shortest: Shortest string of copy_string in training; shortest period of induction; shortest sequence of
            histogram.
        longest: Longest string of copy_string in training; longest period of induction.
        farthest: copy_string: longest string in the curve of accuracy over length.
        offsets: shift_bank: distances back to copy from.
        pairs: recall: keys and values in a sequence.
        hops: hop: largest number of hops.
        prior: markov: distribution of the transition matrices; doubly_stochastic needs two symbols.
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
        num_layers: Number of layers, each with one attention.
        num_heads: Query heads per layer.
        num_kv_heads: Key/value heads; null means num_heads.
        model_dim: Width of the residual stream.
        head_dim: Dimension of a query/key head.
        value_dim: Dimension of a value head; null means head_dim.
        mlp_dim: Hidden width of the MLP after each attention; 0 means no MLP.
        norm: Whether a layer norm precedes attention, MLP and read-out.
        position: How positions are encoded. "relative" learns a bias for each distance. "relative_keys" learns a vector
            for each distance and adds its product with the query to the score.
        rotary_base: rotary: base of the wavelengths.
        embed_scale: Standard deviation of the initial embeddings.
        kernel_scale: Standard deviation of the initial kernels; null means LeCun initialization.
        causal: Whether a query sees only the tokens up to its own, rather than all.
        window: Number of tokens that a query sees, including its own; null means all.
        tied: Whether the read-out shares its weights with the token embedding.
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
        seeds: Number of seeds, which are trained together.
        first_seed: The first seed; the others follow it.
        steps: Number of updates.
        batch: Sequences per update.
        optimizer: "adamw", or Muon for the kernels and AdamW for everything else. "muon" follows optax, which applies
            Muon to arrays of two axes and thus to no kernel of attention. "muon_joint" treats all heads of a kernel as
            one matrix, "muon_per_head" each head as its own matrix.
        learning_rate: Peak learning rate.
        muon_rate: Peak learning rate of the kernels that Muon updates; AdamW's is learning_rate.
        final_rate: Final learning rate, as a fraction of the peak.
        warmup: Number of steps of linear warm-up.
        b2: Decay of Adam's second moment.
        weight_decay: AdamW's weight decay.
        clip: Maximum global gradient norm.
        entropy_penalty: Loss weight of the heads' mean entropy (0 to 1). It makes heads concentrate their weight.
        entropy_after: Share of the steps (0 to 1) before that penalty begins. A later start lets heads learn first.
        entropy_below: Loss in nats below which that penalty applies, checked for each seed in each step; null means at
            any loss. It spares heads that have not learned yet.
        place_weights: Loss weight of each place; null means 1 for each.
        log_every: Number of steps averaged in each line of metrics.
        look_every: Number of steps between looks at the heads.
        checkpoint_every: Number of steps between checkpoints, a multiple of look_every.
        keep: Number of newest checkpoints to keep; 0 keeps all.
        start: Where training starts: the parameters of a run (its folder) or of one of its checkpoints (FOLDER@STEP).
            Empty means random parameters. A resumed run does not read it again.
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
        batch: Number of fresh sequences per seed.
        lengths: copy_string: lengths in the curve of accuracy over length.
        look_length: shift_bank: tokens per sequence for looks at the heads, in case the attention weights of whole
            sequences do not fit into memory; null means task.length. Loss and accuracy always use whole sequences.
    """

    batch: int = 1024
    lengths: list[int] = dataclasses.field(default_factory=list)
    look_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The devices that train together: data x heads x sequence.

    Attributes:
        data: Number of devices that split the sequences of a batch.
        heads: Number of devices that split the heads of each attention, and their parameters.
        sequence: Number of devices that split the tokens of each sequence.
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
    """A pretrained sentence encoder to examine. It is not trained.

    Attributes:
        folder: Folder of a saved BERT-family model, with config.json, *.safetensors and tokenizer.json.
        package: Installed package that contains the folder; empty for a folder outside any package.
        groups: Groups of sentences with the same meaning.
    """

    folder: str = ""
    package: str = ""
    groups: list[list[str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A pretrained language model to examine. It is not trained.

    Attributes:
        model: "smollm2", "gemma3", a GGUF file, or the folder of a saved model that jattn.interop loads; or empty.
        first: Token that every sequence begins with.
        seed: Seed of the random tokens, the choice of text and the matched groups.
        sequences: Number of random sequences on which heads are chosen. As many others test the heads, and as many
            sequences are text from the Python documentation (pydoc_data of the standard library).
        period: Number of random tokens before they repeat; every sequence has 1 + 2 * period tokens.
        group: Number of heads in a group: those with the largest score.
        matched: Number of random groups to compare each group with, matched in layer and output norm.
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
    """What a language model's heads do in long texts. No toy model is trained.

    Attributes:
        lengths: Numbers of tokens of a text with its needle, question and answer; empty means no long texts.
            language.seed chooses the text and the needles.
        depths: Number of places for the needle, spread evenly from the start of the text to its end. A single place is
            the middle.
        chosen: Number of texts on which heads are chosen, from the Python documentation and its library's source.
        texts: Number of other texts that judge the heads, from the documentation, the source and packages' licences.
        ablated: Tokens of the texts on which heads are chosen, switched off, or prevented from seeing the needle.
        sizes: Numbers of heads with the largest retrieval scores to switch off, for the curve; at most half of all
            heads.
        distances: Numbers of tokens between a random sequence and its repeat.
        window: Number of tokens that a query sees in a rolling cache.
        streamed: Number of tokens read through that cache.
        pictured: Number of tokens in the text whose weights the report shows in blocks.
        windows: Other windows to give to the layers that have one, without training.
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
    """Circuits of a language model, chosen on some pairs of texts and judged on others. No toy model is trained.

    Attributes:
        pairs: Number of pairs of texts on which edges are chosen; as many others judge them. 0 means no circuits.
            language.seed chooses the names and random tokens.
        steps: Number of inputs between corrupt and clean at which derivatives are taken (EAP-IG).
        sizes: Numbers of edges of the circuits.
        lengths: Numbers of tokens of a repeated sequence. Results on copying use the first. With several, the circuit
            is compared across lengths.
        compared: Number of edges of the circuits that are compared across lengths and shown on pages; one of sizes.
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
        metric: A metric of the run (METRIC), of a control (CONTROL:METRIC), or of a point of the sweep
            (OPTION=VALUE:METRIC).
        minus: Another metric to subtract from it for each seed, or null.
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
    """The kinds of runs."""

    TRAINING = "trains a transformer on a task"
    SENTENCE_ENCODER = "examines a saved sentence encoder"
    LANGUAGE_MODEL = "examines a saved language model, and a toy model that it trains for comparison"
    LONG_TEXTS = "examines a saved language model on long texts"
    CIRCUITS = "finds circuits of a saved language model"


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        name: Name of the experiment; the run folder is runs/NAME unless --out says otherwise.
        description: Short text for the top of the report.
        task: The task to learn.
        model: The transformer.
        train: Training.
        evaluate: Evaluation.
        mesh: The devices that train together. A run can resume on another mesh.
        pretrained: A sentence encoder to examine. Leave out task, model, train and evaluate then.
        language: A language model to examine. Then task, model, train and evaluate describe a toy model, which is
            trained and examined for comparison.
        long: Long texts on which to examine the language model. There is no toy model then.
        circuits: Circuits to find in the language model. There is no toy model then.
        controls: Variants for comparison, trained by the same loop: name -> dotted overrides.
        sweep: Option -> values. Each combination is another control. If the first option is numeric, curves are
            drawn over it. A value may set other options as well: {model.model_dim: 256, train.learning_rate: 1.0e-3}.
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
        """The kind of this run: it examines the saved model of the section that is set, or trains if none is."""
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
