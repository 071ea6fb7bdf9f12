"""Mathematics in Unicode, as LaTeX: a policy writes `½`, `x²`, `√2`, `∞` or `90°`."""

import re
import unicodedata

_COMMANDS = re.findall(
    r"(\S) (\w+)",
    """
    ∞ infty  × times  · cdot  ⋅ cdot  ∙ cdot  ÷ div  ± pm  ∓ mp  ≤ le  ≦ le  ⩽ le  ≥ ge  ≧ ge  ⩾ ge
    ≠ ne  ≈ approx  ≡ equiv  ∪ cup  ∩ cap  ∈ in  ∉ notin  ⊂ subset  ⊆ subseteq  ∅ emptyset
    ∖ setminus  ⌊ lfloor  ⌋ rfloor  ⌈ lceil  ⌉ rceil  ⟨ langle  ⟩ rangle  ∑ sum  ∏ prod  ∫ int
    ∠ angle  → to  α alpha  β beta  γ gamma  δ delta  ε epsilon  ζ zeta  η eta  θ theta  κ kappa
    λ lambda  μ mu  ν nu  ξ xi  π pi  ρ rho  σ sigma  τ tau  φ phi  χ chi  ψ psi  ω omega  Γ Gamma
    Δ Delta  Θ Theta  Λ Lambda  Π Pi  Σ Sigma  Φ Phi  Ψ Psi  Ω Omega
    """,
)
_CHARACTERS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS}
    | {"°": r"^{\circ}", "∣": "|"}
    | dict.fromkeys("−–‐", "-")
    | dict.fromkeys("⁄∕", "/")
    | dict.fromkeys("′’", "'")
)
_CHARACTERS_THAT_NFKC_CHANGES = str.maketrans(
    {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
    | {"º": "°"}
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸᵏᵐ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₓ]+")
_FRACTIONS = re.compile("[¼-¾⅐-⅞↉]")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(-?\d+(?:\.\d+)?|[^\W\d_]))")
"""A root, with its number, letter or bracket."""


def as_latex(text: str) -> str:
    """Returns `text` with LaTeX for mathematics in Unicode, and without currency signs but `$`."""
    if text.isascii():
        return text
    text = text.translate(_CHARACTERS_THAT_NFKC_CHANGES)
    text = _SUPERSCRIPTS.sub(lambda run: f"^{{{_plain(run[0])}}}", text)
    text = _SUBSCRIPTS.sub(lambda run: f"_{{{_plain(run[0])}}}", text)
    text = _FRACTIONS.sub(lambda one: r"\frac{{{}}}{{{}}}".format(*_plain(one[0]).split("⁄")), text)
    text = _ROOT.sub(_root_as_latex, _plain(text)).translate(_CHARACTERS)
    return "".join(sign for sign in text if sign == "$" or unicodedata.category(sign) != "Sc")


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _root_as_latex(root: re.Match[str]) -> str:
    radicand = root[2] or root[3] or root[4] or ""
    return f"{_ROOTS[root[1]]}{{{radicand}}}"
