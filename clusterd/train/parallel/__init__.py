"""Application of a parallel plan to a model and its optimizer, with torch's own facilities."""
