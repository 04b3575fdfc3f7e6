/* 16-bit floating-point types with conversions from and to float. */
#pragma once

#include <cstdint>
#include <cstring>

struct half_float {
    _Float16 value;
    operator float() const {
        return (float)value;
    }
    half_float(float from) : value((_Float16)from) {
    }
};

struct bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float made;
        memcpy(&made, &wide, 4);
        return made;
    }
    bfloat16(float from) {
        uint32_t wide;
        memcpy(&wide, &from, 4);
        bits = from != from ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
};
