// e^x of a vector. Included by the vector headers.
#pragma once

namespace sakiyomi {
namespace {

// e^x = 2^n e^r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Taylor's, whose rest is below 2^-23 there).
// 0 from -88 down; not a number stays so, infinity becomes large; e^0 is 1 exactly.
inline V exp(V x) {
    V y = min(set1(88.0f), max(set1(-88.0f), x));  // x second: not a number passes
    V n = round_to_whole(mul(y, set1(1.44269504f)));
    V r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    V p = set1(1.0f / 720);
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return mul(p, power_of_2(n));
}

}  // namespace
}  // namespace sakiyomi
